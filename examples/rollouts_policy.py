"""The task of rollouts.py, its policy and its loss: sort three digits, learned from the reward alone (GRPO).

Nothing here knows of sparseps.
"""

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import nn

DIGITS, PLACES = 10, 3
BLANK = DIGITS  # of a place that is not written yet
PROMPTS, GROUP = 64, 8  # of a batch: so many prompts, and so many answers to each
CHANCE = 1 / DIGITS
CLIP = 0.2  # of the probabilities' ratio, as PPO has it


class Policy(nn.Module):
    """Scores the digit that is written next, from the prompt and what is written so far; 79,882 parameters."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.EmbeddingBag((DIGITS + 1) * 2 * PLACES, width, mode="sum")  # one for each digit at each place
        self.head = nn.Sequential(nn.LayerNorm(width), nn.GELU(), nn.Linear(width, DIGITS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Take digits and blanks (…, 6), prompt and answer; return scores (…, 10)."""
        places = torch.arange(2 * PLACES, dtype=torch.int64, device=text.device) * (DIGITS + 1)
        scores: torch.Tensor = self.head(self.tokens((text + places).flatten(0, -2)))
        return scores.view(*text.shape[:-1], DIGITS)


class Episodes(NamedTuple):
    """A batch of answers and their rewards, in numpy: these are bytes that survive the process that sent them.

    torch would send tensors as handles of shared memory, which end with their process.

    Attributes:
        text: prompt and answer, int64 (512, 6).
        logp: of each digit, by the policy that wrote it, float32 (512, 3).
        rewards: share of the digits that are right, float32 (512).
        version: of the policy that wrote the answers.
    """

    text: NDArray[Any]
    logp: NDArray[Any]
    rewards: NDArray[Any]
    version: int


@torch.no_grad()
def sample(policy: nn.Module, version: int) -> Episodes:
    """Write answers to new prompts, one digit after the other."""
    prompts = torch.randint(DIGITS, (PROMPTS, PLACES), dtype=torch.int64, device="cpu").repeat_interleave(GROUP, 0)
    text = torch.cat([prompts, torch.full_like(prompts, BLANK)], 1)
    logp = torch.empty(prompts.shape, dtype=torch.float32, device="cpu")
    for place in range(PLACES):
        scores = policy(text).float().log_softmax(-1)
        digit = torch.multinomial(scores.exp(), 1)
        text[:, PLACES + place] = digit[:, 0]
        logp[:, place] = scores.gather(1, digit)[:, 0]
    rewards = (text[:, PLACES:] == prompts.sort(1).values).float().mean(1)
    return Episodes(text.numpy(), logp.numpy(), rewards.numpy(), version)


def loss_of(policy: nn.Module, episodes: Episodes) -> torch.Tensor:
    """Return GRPO's loss: better answers than the others to the same prompt become more likely.

    The ratio corrects for the policy that wrote the answers: it is some versions older, and in bfloat16.
    """
    text, before = torch.from_numpy(episodes.text), torch.from_numpy(episodes.logp)
    rewards = torch.from_numpy(episodes.rewards).view(-1, GROUP)
    spread = rewards.std(1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
    prefixes = text.unsqueeze(1).repeat(1, PLACES, 1)  # as each digit was written: with blanks from its place on
    for place in range(PLACES):
        prefixes[:, place, PLACES + place :] = BLANK
    logp = policy(prefixes).log_softmax(-1).gather(-1, text[:, PLACES:].unsqueeze(-1)).squeeze(-1)
    ratio = (logp - before).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
