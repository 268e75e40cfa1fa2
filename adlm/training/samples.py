"""A few texts of the network as it is now, into a file. Knows no method by name."""

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


def write_samples(trainee: TrainState, supply: TrainingData, folder: Path, step: int, processes: Processes) -> None:
    """folder/step-00005000.txt. Every process walks the same way, because weights are gathered together."""
    config = trainee.method.config
    vocabulary, train = vocabulary_of(config), config.train
    canvas = torch.full((train.samples, config.length), vocabulary.mask_id, device=processes.device)
    if vocabulary.bos_id is None and supply.num_held_out:
        canvas[:, 0] = supply.read(0, 1)[0][0, 0]  # left to right needs a first token
    draws = RowRng(seed_of(train.seed, "samples", step), range(train.samples))
    with trainee.with_ema():
        last = last_frame(trainee.method.generate(trainee.network, canvas, config.sampling, draws))
    if processes.first:
        texts = [supply.tokenizer.decode(row, special_tokens=False) for row in last.ids.tolist()]
        ruled = "\n".join(f"--- {number} ---\n{text}\n" for number, text in enumerate(texts, 1))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"step-{step:08}.txt", ruled)
