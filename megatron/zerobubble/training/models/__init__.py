"""The models that the reference trainer builds from its flags."""
