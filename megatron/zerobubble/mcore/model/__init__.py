"""A rank's model chunks under any placement: the B/W split of their layers, layout, embeddings, random numbers, fp16."""
