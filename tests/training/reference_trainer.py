"""The reference trainer as a script, which pretrain_gpt.py runs only where megatron-core has no `megatron.training`."""

from megatron.zerobubble.cli.run import run_itself

if __name__ == "__main__":
    if (zero_bubble := globals().get("__zero_bubble__")) is None:
        run_itself(__file__)
    else:
        from megatron.zerobubble.training.trainer import main

        main(zero_bubble)
