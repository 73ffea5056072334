"""Published recipes of Megatron-Bridge, Megatron-LM and Primus, against the checks that a job goes through before it trains."""
