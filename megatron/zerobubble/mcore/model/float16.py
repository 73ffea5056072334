"""Half-precision chunks under any placement.

megatron-core's `Float16Module` casts the inputs of the first stage and returns the last stage's output in fp32. It assumes that
the last stage is the last chunk of the last pipeline rank. Under V that is a middle stage, whose activation would be sent in fp32
and not fit its receive buffer. So we ask the chunk's own `pre_process` and `post_process`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import Float16Module, float16_to_fp32, fp32_to_float16


class StageFloat16Module(Float16Module):
    """`Float16Module` that finds the first and the last stage by the chunk's `pre_process` and `post_process`."""

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Run the chunk in its own precision; the last stage's output is fp32 unless `fp32_output` is False."""
        if self.module.pre_process:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if self.module.post_process and fp32_output else outputs
