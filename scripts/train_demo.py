"""Trains the small demo model of staticllm from scratch and exports it to OpenVINO.

    pip install ".[train]"      # torch, transformers, tokenizers, optimum, optimum-intel, nncf
    python scripts/train_demo.py        # writes staticllm/demo_model, about 40 minutes on two CPU cores
    python scripts/train_demo.py --quick    # one minute, into the work folder, only to try the script

The text comes from demo_corpus.py, which generates it from a seed; nothing is downloaded. The batch of a step depends only
on the seed and the step's number, so that a run continued with --resume sees the same text as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_corpus import BALANCED, BOS, CHAT_TEMPLATE, EOS, GENERAL, PAD, PRACTICE, SPECIAL_TOKENS, Mix, document
from demo_export import TrainingReport, export_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO_DIR = Path(__file__).resolve().parent.parent / "staticllm" / "demo_model"
ROW_LENGTHS, ROW_WEIGHTS = (256, 512, 1024), (60, 25, 15)
MIXES = ((0, GENERAL), (2400, PRACTICE), (3200, BALANCED))  # (first step, mix of text)
IGNORE = -100  # the label that the loss function leaves out


@dataclass(frozen=True)
class Batch:
    """Token ids and labels, both of shape (rows, length)."""

    ids: torch.Tensor
    labels: torch.Tensor


def parse_args() -> argparse.Namespace:
    """Read the command line; the defaults are those of the shipped model."""
    parser = argparse.ArgumentParser(description="Train and export the demo model of staticllm.")
    parser.add_argument("--out", type=Path, default=DEMO_DIR, help="folder of the exported model")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "staticllm_demo_training",
        help="folder for checkpoints and the uncompressed model",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--warmup", type=int, default=100, help="steps in which the learning rate rises")
    parser.add_argument("--decay-steps", type=int, default=1000, help="last steps, in which the learning rate falls")
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="bfloat16 autocast: twice as fast on a CPU with AVX512-BF16, slow on one without",
    )
    parser.add_argument("--save-every", type=int, default=200, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the work folder")
    parser.add_argument("--quick", action="store_true", help="one minute of training, exported into the work folder")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.warmup, args.decay_steps = 60, 10, 40
        args.work = args.work / "quick"
        args.out = args.work / "model"
    return args


def train_tokenizer(seed: int, vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the corpus; it can encode every byte."""
    rng = random.Random(f"{seed}/tokenizer")
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = (piece for _ in range(12000) for piece in special.split(document(rng)) if piece)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=SPECIAL_TOKENS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Create the untrained model: the Llama design, very small."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class BatchMaker:
    """Packs whole documents into rows of a fixed length."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tokens_per_step: int) -> None:
        self.tokenizer, self.tokens_per_step = tokenizer, tokens_per_step
        self.asked = set(tokenizer.convert_tokens_to_ids(["<|system|>", "<|user|>"]))

    def labels(self, ids: list[int]) -> list[int]:
        """Return labels without the messages of users and system prompts, which the model need not predict."""
        labels, inside = [], False
        for token in ids:
            labels.append(IGNORE if inside else token)
            if token in self.asked:
                inside = True
            elif token == self.tokenizer.eos_token_id:
                inside = False
        return labels

    def row(self, rng: random.Random, length: int, mix: Mix) -> list[int]:
        """Fill one row with documents; every row starts with a new one, as every prompt does."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self.tokenizer(document(rng, mix, long=length == 1024), add_special_tokens=False)["input_ids"]
        return ids[:length]

    def batch(self, key: str, mix: Mix = GENERAL) -> Batch:
        """Make the batch that belongs to a key, such as "7/train/120"."""
        rng = random.Random(key)
        length = rng.choices(ROW_LENGTHS, weights=ROW_WEIGHTS)[0]
        rows = [self.row(rng, length, mix) for _ in range(max(1, self.tokens_per_step // length))]
        return Batch(torch.tensor(rows), torch.tensor([self.labels(row) for row in rows]))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Rise, stay constant, then fall along a cosine; the length of training can be chosen while the rate is constant."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = max(0.0, 1 - (args.steps - step) / args.decay_steps)
    return args.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def mix_at(step: int) -> Mix:
    """Return the mix of a step; text that is hard to learn comes more often after the grammar of stories is learned."""
    return [mix for first, mix in MIXES if step >= first][-1]


def make_optimizer(model: LlamaForCausalLM, args: argparse.Namespace) -> torch.optim.AdamW:
    """Create AdamW, with weight decay for the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def compute_loss(model: LlamaForCausalLM, batch: Batch, bf16: bool) -> torch.Tensor:
    """Return the mean loss over the tokens that count."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        return model(input_ids=batch.ids, labels=batch.labels, use_cache=False).loss


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, maker: BatchMaker, args: argparse.Namespace, batches: int = 12) -> float:
    """Return the mean loss on text of another random stream, which training never sees as such."""
    model.eval()
    losses = [
        compute_loss(model, maker.batch(f"{args.seed}/held-out/{index}"), args.bf16).item() for index in range(batches)
    ]
    model.train()
    return sum(losses) / len(losses)


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, state: dict) -> None:
    """Write the checkpoint beside its final name first, so that an interruption cannot spoil it."""
    beside = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **state}, beside)
    beside.replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> tuple[int, float]:
    """Restore a checkpoint; return the next step and the seconds already spent."""
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["seconds"]


def train_steps(
    model: LlamaForCausalLM, optimizer: torch.optim.AdamW, maker: BatchMaker, args: argparse.Namespace, first: int
) -> Iterator[tuple[int, float]]:
    """Train step by step, yielding the number of steps done and the loss of the last one."""
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        loss = compute_loss(model, maker.batch(f"{args.seed}/train/{step}", mix_at(step)), args.bf16)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step + 1, loss.item()


def train(model: LlamaForCausalLM, maker: BatchMaker, args: argparse.Namespace) -> TrainingReport:
    """Run the whole training, with checkpoints and a log; return what the model card says about it."""
    optimizer, checkpoint = make_optimizer(model, args), args.work / "checkpoint.pt"
    first, before = (0, 0.0)
    if args.swap_in and checkpoint.exists():
        first, before = load_checkpoint(checkpoint, model, optimizer)
    model.train()
    start, recent = time.monotonic(), []
    for done, loss in train_steps(model, optimizer, maker, args, first):
        recent.append(loss)
        seconds = before + time.monotonic() - start
        if done % 20 == 0:
            print(f"step {done}/{args.steps}  loss {sum(recent) / len(recent):.3f}  {seconds:.0f} s", flush=True)
            recent.clear()
        if done % args.save_every == 0:
            save_checkpoint(checkpoint, model, optimizer, {"step": done, "seconds": seconds})
            print(f"step {done}  held-out loss {held_out_loss(model, maker, args):.3f}", flush=True)
    seconds = before + time.monotonic() - start
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return TrainingReport(
        args.seed,
        args.steps,
        args.steps * args.tokens_per_step,
        parameters,
        seconds / 60,
        held_out_loss(model, maker, args),
    )


def main() -> None:
    """Train, report and export."""
    args = parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer(args.seed, args.vocab)
    model = build_model(tokenizer)
    report = train(model, BatchMaker(tokenizer, args.tokens_per_step), args)
    print(report, flush=True)
    export_model(model.eval(), tokenizer, args.work / "float_model", args.out, report)


if __name__ == "__main__":
    main()
