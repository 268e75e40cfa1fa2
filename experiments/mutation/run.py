"""Flip a sign, shift an index, swap two names: does a test fail? Every mutant here must be caught.

Each mutant is made in a copy of the tree, and the suite runs there until its first failure, tests of the mutated package
first. The unmutated copy runs first and must pass: else every mutant would be caught by what fails anyway.

    python experiments/mutation/run.py > experiments/mutation/log.txt
    python experiments/mutation/run.py training methods/adlm.py    # only mutants of these files
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

# (file, what stands there, what the mutant says)
MUTANTS = [
    ("diffusion/schedules.py", "return torch.full_like(t, self.eps - 1)", "return torch.full_like(t, 1 - self.eps)"),
    ("diffusion/schedules.py", "return (1 - self.eps) * t", "return (1 + self.eps) * t"),
    ("diffusion/schedules.py", "2 * torch.sin(math.pi / 4 * t) ** 2", "2 * torch.sin(math.pi / 2 * t) ** 2"),
    ("diffusion/schedules.py", "-math.log(self.sigma_max / self.sigma_min)", "-math.log(self.sigma_max - self.sigma_min)"),
    ("diffusion/times.py", "device=generator.device) + 1", "device=generator.device)"),
    ("diffusion/times.py", "torch.randperm(rows.total, generator=generator", "torch.arange(rows.total"),
    ("diffusion/times.py", "return index / steps, (index - 1) / steps", "return index / steps, (index + 1) / steps"),
    ("diffusion/times.py", "torch.ceil(", "torch.floor("),
    ("diffusion/masking.py", "x.device) < mask_chance", "x.device) > mask_chance"),
    ("diffusion/masking.py", "(alpha_s - (1 - remask) * alpha_t)", "(alpha_s - (1 + remask) * alpha_t)"),
    ("diffusion/masking.py", "(1 - alpha_s) / alpha_t, 1.0)", "(1 - alpha_t) / alpha_s, 1.0)"),
    ("diffusion/masking.py", "(1 - remask) * to_itself + remask * to_mask", "remask * to_itself + (1 - remask) * to_mask"),
    ("diffusion/beliefs.py", "(z == mask_id)[..., None], guessed, copied", "(z == mask_id)[..., None], guessed, guessed"),
    ("diffusion/objectives.py", "<= tau", "< tau"),
    ("diffusion/objectives.py", "(~pad).to(x.dtype)", "pad.to(x.dtype)"),
    ("diffusion/objectives.py", "return -schedule.alpha_prime(t) / schedule.mask_chance(t)", "return -schedule.alpha_prime(t) / schedule.alpha(t)"),
    ("diffusion/objectives.py", "return steps * reveal_chance", "return (steps - 1) * reveal_chance"),
    ("diffusion/objectives.py", "return min(gamma, progress)", "return max(gamma, progress)"),
    ("diffusion/objectives.py", "anchors & masked", "anchors | masked"),
    ("diffusion/beliefs.py", "log_r - 1 - log_score_right", "log_r + 1 - log_score_right"),
    ("diffusion/beliefs.py", "logits.shape[-1] - 1", "logits.shape[-1]"),
    ("diffusion/masking.py", "gain_t - log_right", "gain_s - log_right"),
    ("diffusion/masking.py", "(1 - alpha_s + alpha_s * mask_mass) / norm", "(1 - alpha_t + alpha_s * mask_mass) / norm"),
    ("models/heads.py", "scatter_add_(-1, target, -weight)", "scatter_add_(-1, target, weight)"),
    ("models/heads.py", "slice(num * chunk // chunks, num * (chunk + 1) // chunks)", "slice(num * chunk // chunks, num * (chunk + 1) // chunks - 1)"),
    ("models/heads.py", "low_bias[excluded].fill_", "low_bias[excluded - 1].fill_"),
    ("models/heads.py", "(weight != 0).flatten()", "(weight > 0.5).flatten()"),
    ("models/layers.py", "first * cos - second * sin", "first * cos + second * sin"),
    ("models/transformer.py", "h * (1 + scale) + shift", "h * scale + shift"),
    ("models/transformer.py", "shift1, scale1, gate1, shift2, scale2, gate2 = parts", "scale1, shift1, gate1, shift2, scale2, gate2 = parts"),
    ("models/transformer.py", "[angles.cos(), angles.sin()]", "[angles.sin(), angles.cos()]"),
    ("models/transformer.py", "(3, self.heads, -1)).unbind(dim=2)", "(self.heads, 3, -1)).unbind(dim=3)"),
    ("models/transformer.py", 'approximate="tanh"', 'approximate="none"'),
    ("models/layers.py", "is_causal=causal and visible is None", "is_causal=False"),
    ("models/transformer.py", "(~pad | pad.all", "(pad | pad.all"),
    ("models/transformer.py", "shift, scale = self.modulation", "scale, shift = self.modulation"),
    ("models/bridges.py", "self.weight @ head.bias + self.bias", "self.weight @ head.bias - self.bias"),
    ("models/anchored.py", "self.denoiser.trunk.hidden_and_states(bridged, sigma, pad, ", "self.denoiser.trunk.hidden_and_states(bridged, None, pad, "),
    ("models/transformer.py", "LONGEST_PERIOD = 10_000.0", "LONGEST_PERIOD = 1_000.0"),
    ("methods/adlm.py", "total=loss.total + gamma * anchor_scored.total", "total=loss.total + anchor_scored.total"),
    ("methods/masked_diffusion.py", "time.steps, time.sigma)", "time.steps, 0.0)"),
    ("methods/masked_diffusion.py", "schedules.sigma(self.schedule", "schedules.sigma_prime(self.schedule"),
    ("methods/ar.py", "counted[:, 0] = False", "counted[:, -1] = False"),
    ("sampling/rng.py", "inside = chosen.cumsum(dim=-1, dtype=torch.float64)", "inside = chosen.float().cumsum(dim=-1).double()"),
    ("sampling/events.py", "hazard[step + 1] - np.log1p", "hazard[0] - np.log1p"),
    ("sampling/events.py", "remasks[:, remasks[1] < end], \"right\"", "remasks[:, remasks[1] < end], \"left\""),
    ("sampling/events.py", "index_fill_(0, call.remasked, mask_id)", "index_fill_(0, call.remasked[:0], mask_id)"),
    ("sampling/steps.py", "start > t_on, start", "start > t_off, start"),
    ("sampling/shaping.py", "mass - ordered < p if crossing", "mass <= p if crossing"),
    ("sampling/adaptive.py", "-chance.double()", "chance.double()"),
    ("sampling/adaptive.py", "best[:, 0] - best[:, 1]", "best[:, 0] + best[:, 1]"),
    ("sampling/left_to_right.py", "num_read = position", "num_read = position - 1"),
    ("sampling/samplers.py", "min(start + stride, width - length)", "start + stride"),
    ("methods/masked_diffusion.py", "-torch.log(alpha).float()", "torch.log(alpha).float()"),
    ("models/anchored.py", "score_positions(hidden.anchor, self.anchor.head", "score_positions(hidden.denoiser, self.anchor.head"),
    ("models/transformer.py", "gate[:, None] * layer.weight, bias,", "gate * layer.weight, bias,"),
    ("models/transformer.py", "gate * layer.bias", "layer.bias"),
    ("training/step.py", "self.num_updates += finite", "self.num_updates += 1"),
    ("training/step.py", "/ (10 + self.num_updates)", "/ (11 + self.num_updates)"),
    ("training/optimizer.py", "step / warm_up", "(step + 1) / warm_up"),
    ("training/optimizer.py", "rate * group[\"multiple\"]", "rate"),
    ("training/optimizer.py", "betas=(train.beta1, train.beta2)", "betas=(train.beta2, train.beta1)"),
    ("training/optimizer.py", "(norm / clip).clamp(min=1)", "(norm / clip).clamp(max=1)"),
    ("training/step.py", "(loss.total / num_tokens)", "(loss.total / loss.num_tokens)"),
    ("training/optimizer.py", "(~finite).float()", "finite.float()"),
    ("training/step.py", "sums[name] + value if sums else value", "value"),
]  # fmt: skip


PACKAGES = ("diffusion", "sampling", "models", "inference", "methods", "likelihood", "evaluation", "training")


def killer_of(file: str, old: str, new: str) -> str | None:
    """The first test that fails on the mutant, or None where none does; with `old` equal to `new` on the tree itself."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("adlm", "tests", "experiments", "docs", "examples"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        source = copy / "adlm" / file
        text = source.read_text()
        assert text.count(old) >= 1, f"{file} has no {old!r}"
        source.write_text(text.replace(old, new, 1))
        suite = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not processes"]
        packages = sorted(PACKAGES, key=lambda package: package != file.split("/")[0])
        folders = [f"tests/{package}" for package in packages]
        environment = {**os.environ, "PYTHONPATH": folder}
        result = subprocess.run(suite + folders, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else None


def main() -> int:
    chosen = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant[0].startswith(tuple(sys.argv[1:]))]
    if failing := killer_of("diffusion/times.py", "import torch", "import torch"):
        print(f"the tree itself fails: {failing}")
        return 2
    alive = 0
    for file, old, new in chosen:
        killer = killer_of(file, old, new)
        alive += killer is None
        print(f"{'caught  ' if killer else 'SURVIVED'} {file}: {old}  ->  {new}\n         {killer or ''}", flush=True)
    print(f"\n{len(chosen) - alive} of {len(chosen)} mutants caught")
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
