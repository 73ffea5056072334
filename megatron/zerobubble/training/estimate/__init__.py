"""What a run will need and achieve, estimated from its flags before anything runs."""
