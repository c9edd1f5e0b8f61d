"""OpenVINO GenAI: its continuous batching pipeline.

Options: cache_size (GiB) and other fields of SchedulerConfig; in capitals the device's properties, such as
INFERENCE_PRECISION_HINT.
"""

from __future__ import annotations

from typing import Any

import numpy
import openvino
import openvino_genai
from driver import Prepare, Request, Run, serve

DEFAULTS = {"cache_size": 1, "enable_prefix_caching": True}


def load(model: str, threads: int, options: dict[str, Any]) -> tuple[Prepare, str]:
    scheduler = openvino_genai.SchedulerConfig()
    properties = {"INFERENCE_NUM_THREADS": threads}
    for name, value in {**DEFAULTS, **options}.items():
        if name.isupper():
            properties[name] = value
            continue
        if not hasattr(scheduler, name):
            raise ValueError(f"OpenVINO's scheduler has no option {name!r}")
        setattr(scheduler, name, value)
    engine = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def prepare(requests: list[Request]) -> Run:
        prompts = [openvino.Tensor(numpy.array([each["prompt_token_ids"]], dtype=numpy.int64)) for each in requests]
        settings = [
            openvino_genai.GenerationConfig(max_new_tokens=each["max_tokens"], ignore_eos=True, do_sample=False)
            for each in requests
        ]
        return lambda: [len(result.m_generation_ids[0]) for result in engine.generate(prompts, settings)]

    return prepare, openvino_genai.__version__


if __name__ == "__main__":
    serve(load)
