"""Writes a few samples of the network to a file during training. Independent of the method."""

from pathlib import Path

import torch

from adlm.files import write_file, writing
from adlm.methods.inputs import vocabulary_of
from adlm.sampling.frame import last_frame
from adlm.sampling.rng import RowRng
from adlm.training.data import TrainingData
from adlm.training.rng import seed_of
from adlm.training.sharding import Processes
from adlm.training.train_state import TrainState


def write_samples(state: TrainState, data: TrainingData, folder: Path, step: int, processes: Processes) -> None:
    """Write folder/step-00005000.txt. Every process samples, because gathering sharded weights is collective."""
    config = state.method.config
    vocabulary, train = vocabulary_of(config), config.train
    canvas = torch.full((train.samples, config.length), vocabulary.mask_id, device=processes.device)
    if vocabulary.bos_id is None and data.num_held_out:
        canvas[:, 0] = data.read_held_out(0, 1)[0][0, 0]  # autoregressive methods need a first token
    rng = RowRng(seed_of(train.seed, "samples", step), range(train.samples))
    with state.with_ema():
        frame = last_frame(state.method.generate(state.network, canvas, config.sampling, rng))
    if processes.is_main_process:
        texts = [data.tokenizer.decode(row, special_tokens=False) for row in frame.ids.tolist()]
        content = "\n".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"step-{step:08}.txt", content)
