"""What PyTorch's anomaly mode and Hugging Face's detector say about the same faults.

The model of `faulty_transformer` in PyTorch, with the same parameters, batch and loss
scale. The line that breaks first ends in `# breaks: NAME`. Prints a Markdown table, in
twenty seconds. It needs an environment of its own:

    pip install torch==2.13.0 transformers==5.23.0 jax==0.10.2
    python tests/support/other_tools_torch.py
"""

import inspect
import io
import linecache
import re
import warnings
from contextlib import redirect_stdout, suppress

import numpy as np
import torch
from faulty_transformer import CONTEXT, FAULTS, HEADS, LAYERS, inputs
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow


class Part(nn.Module):
    """A part of the model: float32 parameters, and computation in `half`."""

    fault, half = None, torch.float16

    def __init__(self, **params):
        super().__init__()
        for name, value in params.items():
            setattr(self, name, nn.Parameter(torch.tensor(np.array(value))))


class Embed(Part):
    def forward(self, tokens, features):
        x = self.tokens.to(self.half)[tokens] + self.positions.to(self.half)
        return x + features.to(self.half)  # breaks: data


class Normalize(Part):
    def forward(self, x):
        x = x.to(self.half if self.fault == "variance" else torch.float32)
        x = x - x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True)  # breaks: variance
        return (x * torch.rsqrt(variance + 1e-5)).to(self.half)


class Attend(Part):
    def forward(self, x):
        qkv = (x @ self.qkv.to(self.half)).view(*x.shape[:2], 3 * HEADS, -1)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=1)
        if self.fault != "logits":
            q, k = q.float() * q.shape[-1] ** -0.5, k.float()
        scores = q @ k.mT  # breaks: logits
        causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).tril()
        if self.fault == "mask":
            # Breaks nothing: only the product is rounded, to 0 or -inf, never to nan.
            scores = scores.to(self.half) + (1 - causal.to(self.half)) * -1e9
        else:
            scores = scores.float().masked_fill(~causal, -torch.inf)
        mixed = scores.softmax(-1).to(self.half) @ v
        return mixed.transpose(1, 2).reshape(x.shape) @ self.out.to(self.half)


class FeedForward(Part):
    def forward(self, x):
        h = x @ self.up.to(self.half)
        if self.fault != "gelu":
            h = h.float()
        h = 0.5 * h * (1 + torch.tanh(0.79788 * (h + 0.044715 * h**3)))  # breaks: gelu
        return h.to(self.half) @ self.down.to(self.half)


class Block(Part):
    def __init__(self, qkv, out, up, down):
        super().__init__()
        self.normalize = Normalize()
        self.attend = Attend(qkv=qkv, out=out)
        self.feed_forward = FeedForward(up=up, down=down)

    def forward(self, x):
        x = x + self.attend(self.normalize(x))  # breaks: residual
        return x + self.feed_forward(self.normalize(x))  # breaks: residual


class Objective(Part):
    def forward(self, logits, batch):
        if self.fault == "softmax":
            exponentials = logits.exp()
            total = exponentials.sum(-1, keepdim=True)  # breaks: softmax
            logs = (exponentials / total).log()
        elif self.fault == "logarithm":
            logs = logits.softmax(-1).log()  # breaks: logarithm
        else:
            logs = logits.float().log_softmax(-1)
        losses = -logs.gather(-1, batch["tokens"][:, 1:, None])[..., 0].float()
        wide = logits if self.fault == "mean" else logits.float()
        penalty = wide.square().sum() / wide.numel()  # breaks: mean
        weights = batch["weights"]
        if self.fault == "sum":
            return (losses * weights).sum() + 1e-3 * penalty
        if self.fault == "division":
            losses, weights = losses.to(self.half), weights.to(self.half)
        mean = (losses * weights).sum(-1) / (weights.sum(-1) + 1e-8)  # breaks: division
        value = mean.float().mean() + 1e-3 * penalty.float()
        if "reference" in batch:
            half = self.half if self.fault == "exponential" else torch.float32
            ratio = (-losses - batch["reference"]).to(half).exp()  # breaks: exponential
            value = value - ratio.minimum(ratio.clip(0.8, 1.2)).float().mean()
        return value


class Transformer(Part):
    def __init__(self, embed, positions, blocks, head, bias):
        super().__init__(head=head, bias=bias)
        self.embed = Embed(tokens=embed, positions=positions)
        self.blocks = nn.Sequential(*(Block(**block) for block in blocks))
        self.normalize, self.objective = Normalize(), Objective()

    def forward(self, batch):
        x = self.embed(batch["tokens"][:, :-1], batch["features"])
        x = self.normalize(self.blocks(x if self.fault == "residual" else x.float()))
        logits = x @ self.head.to(self.half) + self.bias.to(self.half)  # breaks: sum
        return self.objective(logits, batch)


def step(name, half=torch.float16, watch=lambda model: None):
    """Returns the loss of a scaled step, and its unscaled gradient as one vector."""
    Part.fault, Part.half = name, half
    params, batch = inputs(name, LAYERS)
    model = Transformer(**params)
    watch(model)
    scale = 2.0**15 if name == "sum" else 2.0**10
    loss = model({k: torch.tensor(np.array(v)) for k, v in batch.items()})
    (loss * scale).backward()
    return loss, torch.cat([p.grad.flatten() for p in model.parameters()]) / scale


def errors(name):
    """Returns how far the loss and the gradient are from float32."""
    pairs = zip(step(name), step(name, torch.float32), strict=True)
    return ", ".join(f"{(a - b).norm() / b.norm():.1%}" for a, b in pairs)


def anomaly_mode(name):
    """Returns what `detect_anomaly` says, and the line that its warning names."""
    with warnings.catch_warnings(record=True) as caught, suppress(RuntimeError):
        torch.autograd.set_detect_anomaly(True)
        step(name)
    torch.autograd.set_detect_anomaly(False)
    text = "".join(str(warning.message) for warning in caught)
    if "Error detected" not in text:
        return "nothing"
    frames = re.findall(rf'"{re.escape(__file__)}", line (\d+)', text)
    named = linecache.getline(__file__, int(frames[-1])) if frames else "no line"
    return f"{re.findall('Error detected in .*?[.]', text)[0]} {named.strip()}"


def detector(name):
    """Returns what `DebugUnderflowOverflow` says, and the module that it names last."""
    with redirect_stdout(io.StringIO()) as printed, suppress(ValueError):
        step(name, watch=DebugUnderflowOverflow)
    text = printed.getvalue()
    if "Detected" not in text:
        return "nothing"
    module, of_class = re.findall(r"^ {17} (\S*) (\w+)$", text, re.MULTILINE)[-1]
    is_right = f"# breaks: {name}\n" in inspect.getsource(globals()[of_class])
    return f"{text.splitlines()[0]} {module}, {'the' if is_right else 'another'} module"


if __name__ == "__main__":
    tools = errors, anomaly_mode, detector
    print(f"| fault | {' | '.join(tool.__name__ for tool in tools)} |\n|{' --- |' * 4}")
    for name in (None, *FAULTS):
        print(f"| {name} | {' | '.join(tool(name) for tool in tools)} |")
