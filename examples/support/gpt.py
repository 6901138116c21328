"""A small GPT over bytes: pre-norm blocks, causal attention, tied embeddings (Radford et al., 2019)."""

import torch
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in.

    Args:
        heads: of the attention.
        width: of the embedding.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, time, width)."""
        split = self.attention_in(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = split
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.perceptron(self.norms[1](x))
        return out


class GPT(nn.Module):
    """A language model whose tokens are bytes.

    Args:
        layers: blocks.
        heads: of each.
        width: of the embedding, a multiple of ``heads``.
        context: bytes that it sees at once.
    """

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads")
        self.context = context
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of every next byte: (batch, time) in, (batch, time, 256) out."""
        places = torch.arange(text.shape[1], device=text.device)
        scores: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(text) + self.places(places))))
        return scores

    @torch.inference_mode()
    def write(self, start: bytes, length: int, *, seed: int = 0) -> bytes:
        """Go on with a text by ``length`` bytes."""
        generator = torch.Generator().manual_seed(seed)
        text = list(start)
        for _ in range(length):
            scores = self(torch.tensor([text[-self.context :]]))[0, -1]
            text.append(int(torch.multinomial(torch.softmax(scores / 0.8, 0), 1, generator=generator)))
        return bytes(text)
