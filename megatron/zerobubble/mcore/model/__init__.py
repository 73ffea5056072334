"""A rank's model chunks under any placement: B/W split, layout, tied embeddings, RNG streams, half precision, loss scales."""
