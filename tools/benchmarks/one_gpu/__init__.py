"""Every rank's real program measured alone on one device, and the pipeline composed from it."""
