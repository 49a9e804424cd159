"""Recipes for programs on PyTorch: loops, DDP, FSDP2, Lightning, the Trainer of Hugging Face."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

from real_program import Program, after, before, replace

WORDS = 60


def _text(seed: int, lines: int) -> str:
    """Lines of words from a small vocabulary."""
    source = random.Random(seed)
    return "".join(
        " ".join(f"w{source.randrange(WORDS)}" for _ in range(12)) + "\n" for _ in range(lines)
    )


def _corpus(target: Path) -> None:
    (target / "corpus").mkdir()
    for seed, name in enumerate(("train", "valid", "test")):
        (target / "corpus" / f"{name}.txt").write_text(_text(seed, 300 if name == "train" else 40))


def _results(target: Path) -> None:
    (target / "results").mkdir(exist_ok=True)


def _shakespeare(target: Path) -> None:
    """What `prepare.py` of nanoGPT makes, of a text of ours."""
    import numpy as np

    folder = target / "data" / "small"
    folder.mkdir(parents=True)
    text = _text(0, 300).encode()
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / "train.bin")
    np.frombuffer(text[:4000], np.uint8).astype(np.uint16).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 128}))


def _wikitext(target: Path) -> None:
    (target / "data").mkdir()
    (target / "data" / "wikitext-2.txt").write_text(_text(0, 700))


def _save_tokenizer(folder: Path, **special: str) -> None:
    """A tokenizer of single words, after the special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*special.values(), *(f"w{number}" for number in range(WORDS))]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _alpaca(target: Path) -> None:
    """A tiny OPT with random weights and a tokenizer of single words, and instructions."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=WORDS + 1,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    OPTForCausalLM(config).save_pretrained(target / "tiny")
    _save_tokenizer(target / "tiny", unk_token="<unk>")
    examples = [
        {"instruction": _text(seed, 1), "input": "", "output": _text(seed + 1000, 1)}
        for seed in range(80)
    ]
    (target / "data.json").write_text(json.dumps(examples))
    (target / "openai.py").write_text(
        "from types import SimpleNamespace\n\nopenai_object = SimpleNamespace(OpenAIObject=object)\n"
    )


MNIST = Program(
    name="PyTorch examples, mnist",
    is_standing_in=True,
    folder="examples/mnist",
    file="main.py",
    needs=("torch",),
    arguments="--epochs 3 --batch-size 16",
    edits=(
        after("from torchvision import", "import perdure.torch"),
        before(
            "model = Net().to(device)",
            "train_loader = perdure.torch.ResumableLoader(train_loader)",
        ),
        after(
            "scheduler = StepLR(",
            'args.state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, '
            '"loader": train_loader}',
            'args.manager = perdure.CheckpointManager("run", save_interval_steps=5)',
            "args.manager.restore_or_initialize(args.state)",
        ),
        replace("in range(1,", "in range(1 + train_loader.epoch,"),
        after("optimizer.step()", "args.manager.save(train_loader.step, args.state)"),
    ),
)

VAE = Program(
    name="PyTorch examples, vae",
    is_standing_in=True,
    folder="examples/vae",
    file="main.py",
    needs=("torch",),
    arguments="--epochs 3 --batch-size 16",
    prepare=_results,
    edits=(
        after("from torchvision.utils", "import perdure.torch"),
        before("class VAE(", "train_loader = perdure.torch.ResumableLoader(train_loader)"),
        after(
            "optimizer = optim.Adam(",
            'state = {"model": model, "optimizer": optimizer, "loader": train_loader}',
            'manager = perdure.CheckpointManager("run", save_interval_steps=5)',
            "manager.restore_or_initialize(state)",
        ),
        after("optimizer.step()", "manager.save(train_loader.step, state)"),
        replace("in range(1,", "in range(1 + train_loader.epoch,"),
    ),
)

WORD_LANGUAGE_MODEL = Program(
    name="PyTorch examples, word_language_model (LSTM)",
    folder="examples/word_language_model",
    file="main.py",
    needs=("torch",),
    arguments="--data corpus --emsize 16 --nhid 16 --epochs 3",
    prepare=_corpus,
    epoch=6,
    first=7,
    edits=(
        after("import torch.onnx", "import perdure"),
        # A step is 10,000 times the epoch and the batch.
        before(
            "# Loop over epochs.",
            'manager = perdure.CheckpointManager("run", save_interval_steps=2)',
            'loop, start = manager.restore_or_initialize({"model": model, "lr": args.lr, "best": 0.0, '
            '"hidden": model.init_hidden(args.batch_size)})',
        ),
        after("best_val_loss = None", 'lr, best_val_loss = loop["lr"], loop["best"]'),
        replace("in range(1, args.epochs", "in range(max(1, start // 10000), args.epochs"),
        after(
            "hidden = model.init_hidden(args.batch_size)",
            'hidden = loop["hidden"] if epoch == start // 10000 else hidden',
        ),
        before(
            "data, targets = get_batch(train_data, i)",
            "if epoch * 10000 + batch <= start: continue",
        ),
        before(
            "total_loss += loss.item()",
            'manager.save(epoch * 10000 + batch, {"model": model, "lr": lr, "best": best_val_loss, '
            '"hidden": hidden})',
        ),
    ),
)

NANOGPT = Program(
    name="nanoGPT",
    folder="nanoGPT",
    file="train.py",
    needs=("torch",),
    arguments=(
        "--dataset=small --device=cpu --dtype=float32 --compile=False --block_size=32 --batch_size=4 "
        "--n_layer=2 --n_head=2 --n_embd=32 --dropout=0.1 --gradient_accumulation_steps=2 "
        "--max_iters=20 --lr_decay_iters=20 --warmup_iters=3 --eval_interval=10 --eval_iters=2"
    ),
    prepare=_shakespeare,
    epoch=20,  # two backward passes in a step; an evaluation after ten
    first=24,
    edits=(
        after("from model import GPTConfig, GPT", "import perdure"),
        after(
            "X, Y = get_batch('train') # fetch",
            'manager = perdure.CheckpointManager("run", save_interval_steps=4)',
            'state = {"model": model, "optimizer": optimizer, "scaler": scaler, "X": X, "Y": Y, '
            '"best": best_val_loss}',
            "state, iter_num = manager.restore_or_initialize(state)",
            'X, Y, best_val_loss = state["X"], state["Y"], state["best"]',
        ),
        after(
            "local_iter_num += 1",
            "state.update(X=X, Y=Y, best=float(best_val_loss))",
            "manager.save(iter_num, state)",
        ),
    ),
    own="init_from=resume, a file every 10 steps",
    own_arguments="--init_from=resume",
)

_ON_A_CPU = (
    replace("torch.cuda.set_device(", "int("),
    replace('"nccl"', '"gloo"'),
    replace(".to(self.gpu_id)", '.to("cpu")', every=True),
    replace("device_ids=[self.gpu_id]", "device_ids=None"),
    replace('f"cuda:{self.gpu_id}"', '"cpu"'),
    replace("pin_memory=True", "pin_memory=False"),
)
_SEEDED = after("    ddp_setup()", "torch.manual_seed(0)")

DDP = Program(
    name="PyTorch examples, DDP tutorial under torchrun",
    folder="examples/distributed/ddp-tutorial-series",
    file="multigpu_torchrun.py",
    needs=("torch",),
    imports=("perdure.torch", "torch._dynamo", "torch.distributed.launcher.api"),
    arguments="3 1 --batch_size 64",
    small=(
        *_ON_A_CPU,
        replace("MyTrainDataset(2048)", "MyTrainDataset(1280)"),
        # The cross entropy of its one class is 0, so that the tutorial trains nothing.
        replace("F.cross_entropy(output, targets)", "F.mse_loss(output, targets)"),
    ),
    ranks=2,
    limit=12,
    edits=(
        after("import torch.multiprocessing", "import perdure.torch"),
        _SEEDED,
        after(
            "train_data = prepare_dataloader(",
            "train_data = perdure.torch.ResumableLoader(train_data)",
        ),
        after(
            "self.model = DDP(",
            'self.state = {"model": self.model, "optimizer": optimizer, "loader": train_data}',
            'self.manager = perdure.CheckpointManager("run", save_interval_steps=5, '
            "processes=perdure.torch.process_group())",
            "self.manager.restore_or_initialize(self.state)",
            "self.epochs_run = train_data.epoch",
        ),
        replace("b_sz = len(next(iter(self.train_data))[0])", "b_sz = self.train_data.batch_size"),
        after(
            "self._run_batch(source, targets)",
            "self.manager.save(self.train_data.step, self.state)",
        ),
    ),
    own="its snapshot of each epoch",
    own_edits=(_SEEDED,),
)

FSDP2 = Program(
    name="PyTorch examples, FSDP2 under torchrun",
    folder="examples/distributed/FSDP2",
    file="example.py",
    needs=("torch",),
    imports=(
        "perdure.torch",
        "torch._dynamo",
        "torch.distributed.launcher.api",
        "torch.distributed.fsdp",
    ),
    small=(
        replace("return has_gpu and gpu_count >= min_gpus", "return True"),
        replace("device_id=device)", "device_id=None)"),
        replace("n_layers=10", "n_layers=2"),
        # The example leaves the weights of its layers as the memory was.
        after("model.reset_parameters()", "for layer in model.layers: layer.reset_parameters()"),
    ),
    ranks=2,
    limit=12,
    first=6,
    edits=(
        after("import torch", "import perdure.torch"),
        before(
            "for _ in range(10):",
            'state = {"model": model, "optimizer": optim}',
            'manager = perdure.CheckpointManager("run", save_interval_steps=2, '
            "processes=perdure.torch.process_group())",
            "_, start = manager.restore_or_initialize(state)",
        ),
        replace("for _ in range(10):", "for step in range(start, 10):"),
        after("optim.zero_grad()", "manager.save(step + 1, state)"),
    ),
)

LIGHTNING = Program(
    name="Lightning's example transformer",
    folder="pytorch-lightning/examples/pytorch/basics",
    file="transformer.py",
    needs=("lightning", "requests"),
    imports=("perdure.torch", "torch._dynamo", "lightning"),
    limit=1,
    first=6,
    small=(
        replace("[n - 4000, 2000, 2000]", "[200, 20, n - 220]"),
        replace(
            "max_epochs=20", "max_epochs=3, enable_progress_bar=False, enable_model_summary=False"
        ),
    ),
    prepare=_wikitext,
    edits=(
        after("import lightning as L", "import perdure.plugins.lightning"),
        replace(
            "trainer.fit(model, train_dataloader, val_dataloader)",
            "perdure.plugins.lightning.fit(trainer, 'run', model, train_dataloader, val_dataloader, "
            "every_n_train_steps=4)",
        ),
    ),
    own='ckpt_path="last" with its checkpoints every 4 steps',
    own_edits=(
        replace(
            "gradient_clip_val=0.25,",
            "gradient_clip_val=0.25, callbacks=["
            "L.pytorch.callbacks.ModelCheckpoint('run', every_n_train_steps=4, save_last=True)],",
        ),
        replace(
            "train_dataloader, val_dataloader)",
            'train_dataloader, val_dataloader, ckpt_path="last")',
        ),
    ),
)

TRAINER = Program(
    name="Stanford Alpaca (Hugging Face Trainer)",
    folder="stanford_alpaca",
    file="train.py",
    needs=("transformers", "accelerate"),
    imports=("perdure.torch", "torch._dynamo", "transformers.trainer", "accelerate"),
    limit=1,
    small=(
        replace(
            "tokenizer=tokenizer, args=training_args",
            "processing_class=tokenizer, args=training_args",
        ),
    ),
    arguments=(
        "--model_name_or_path tiny --data_path data.json --output_dir out --num_train_epochs 3 "
        "--per_device_train_batch_size 8 --save_steps 4 --save_strategy no --report_to none "
        "--disable_tqdm True --dataloader_pin_memory False"
    ),
    prepare=_alpaca,
    edits=(
        after("from transformers import Trainer", "import perdure.plugins.transformers"),
        replace("    trainer.train()", '    perdure.plugins.transformers.train(trainer, "run")'),
    ),
    own="resume_from_checkpoint, every 4 steps",
    own_edits=(
        before("trainer = Trainer(", 'training_args.save_strategy = "steps"'),
        replace(
            "    trainer.train()",
            "    trainer.train(resume_from_checkpoint="
            "transformers.trainer_utils.get_last_checkpoint(training_args.output_dir))",
        ),
    ),
)

GAN = Program(
    name="Lightning's example GAN (manual optimization)",
    folder="pytorch-lightning/examples/pytorch/domain_templates",
    file="generative_adversarial_net.py",
    needs=("lightning",),
    imports=("perdure.torch", "torch._dynamo", "lightning"),
    limit=2,
    epoch=20,  # two backward passes for each batch
    small=(
        before("    model = GAN(lr=args.lr", "torch.manual_seed(0)"),
        replace(
            "dm = MNISTDataModule()",
            "dm = torch.utils.data.DataLoader(torch.utils.data.TensorDataset("
            "torch.rand(160, 1, 28, 28), torch.zeros(160)), batch_size=16, shuffle=True)",
        ),
        replace(
            'Trainer(accelerator="gpu", devices=1)',
            'Trainer(accelerator="cpu", devices=1, max_epochs=3, enable_progress_bar=False, '
            "enable_model_summary=False)",
        ),
        replace("grid = torchvision.utils.make_grid(sample_imgs)", "return"),
    ),
    edits=(
        after("from argparse import", "import perdure.plugins.lightning"),
        replace(
            "trainer.fit(model, dm)",
            "perdure.plugins.lightning.fit(trainer, 'run', model, dm, every_n_train_steps=4)",
        ),
    ),
    own='ckpt_path="last" with its checkpoints every 4 steps',
    own_edits=(
        after("from argparse import", "from lightning.pytorch.callbacks import ModelCheckpoint"),
        replace(
            "max_epochs=3",
            "max_epochs=3, callbacks=[ModelCheckpoint('run', every_n_train_steps=4, save_last=True)]",
        ),
        replace("trainer.fit(model, dm)", 'trainer.fit(model, dm, ckpt_path="last")'),
    ),
)


def _noise_digits(target: Path) -> None:
    (target / "noise_digits.py").write_text(
        "import torch\n\n\n"
        "def MNIST(path, download, train, transform):\n"
        "    source = torch.Generator().manual_seed(int(train))\n"
        "    images = torch.rand(160, 1, 28, 28, generator=source)\n"
        "    labels = torch.randint(10, (160,), generator=source)\n"
        "    return torch.utils.data.TensorDataset(images, labels)\n"
    )


FABRIC = Program(
    name="Lightning's example image_classifier (Fabric)",
    folder="pytorch-lightning/examples/fabric/image_classifier",
    file="train_fabric.py",
    needs=("lightning",),
    imports=("perdure.torch", "torch._dynamo", "lightning"),
    small=(
        replace("fabric = Fabric()", 'fabric = Fabric(accelerator="cpu", devices=1)'),
        # torchmetrics needs more of torchvision than is stood in for.
        replace("import torchvision.transforms as T", ""),
        replace("from torchvision.datasets import", "from noise_digits import"),
        replace("T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))])", "None"),
    ),
    prepare=_noise_digits,
    arguments="--epochs 3 --batch-size 16",
    edits=(
        after("import torch.optim as optim", "import perdure.torch"),
        replace(
            "= fabric.setup_dataloaders(train_loader, test_loader)",
            "= perdure.torch.ResumableLoader(train_loader), fabric.setup_dataloaders(test_loader)",
        ),
        after(
            "scheduler = StepLR(",
            'state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, '
            '"loader": train_loader}',
            'manager = perdure.CheckpointManager("run", save_interval_steps=5)',
            "manager.restore_or_initialize(state)",
        ),
        replace("in range(1,", "in range(1 + train_loader.epoch,"),
        after("optimizer.step()", "manager.save(train_loader.step, state)"),
    ),
)


def _mrpc(target: Path) -> None:
    """A tiny BERT with random weights, pairs of sentences, and no download."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 2,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    BertForSequenceClassification(config).save_pretrained(target / "bert-base-cased")
    _save_tokenizer(target / "bert-base-cased", unk_token="<unk>", pad_token="<pad>")
    rows = [{"text": _text(seed, 1 + seed % 2), "labels": seed % 2} for seed in range(200)]
    (target / "rows.json").write_text(json.dumps(rows))
    (target / "datasets.py").write_text(
        "import json\n"
        "from transformers import AutoTokenizer\n\n\n"
        "class Splits(dict):\n"
        "    def map(self, function, **options):\n        return self\n\n"
        "    def rename_column(self, before, after):\n        return self\n\n\n"
        "def load_dataset(*names):\n"
        "    split = AutoTokenizer.from_pretrained('bert-base-cased')\n"
        "    rows = json.load(open('rows.json'))\n"
        "    rows = [dict(split(row['text'])) | {'labels': row['labels']} for row in rows]\n"
        "    return Splits(train=rows[:160], validation=rows[160:])\n"
    )
    (target / "evaluate.py").write_text(
        "from types import SimpleNamespace\n\n\n"
        "def load(*names):\n"
        "    return SimpleNamespace(add_batch=lambda **values: None, compute=lambda: {})\n"
    )


NLP = Program(
    name="Accelerate's nlp_example",
    folder="accelerate/examples",
    file="nlp_example.py",
    needs=("transformers", "accelerate"),
    imports=("perdure.torch", "torch._dynamo", "transformers", "accelerate"),
    limit=4,
    arguments="--cpu",
    prepare=_mrpc,
    edits=(
        after("import argparse", "import perdure.plugins.accelerate"),
        replace(
            "for epoch in range(num_epochs):",
            "for step, batch in perdure.plugins.accelerate.batches("
            'accelerator, train_dataloader, perdure.CheckpointManager("run", save_interval_steps=4), '
            "epochs=num_epochs):",
        ),
        replace(
            "for step, batch in enumerate(train_dataloader):", "with accelerator.accumulate(model):"
        ),
        before("        model.eval()", "if (epoch := step / len(train_dataloader)) % 1: continue"),
    ),
    own="save_state, load_state, skip_first_batches",
    own_edits=(
        before(
            "    for epoch in range(num_epochs):",
            "import os",
            "done = max(map(int, os.listdir('own')), default=0) if os.path.isdir('own') else 0",
            "if done: accelerator.load_state(f'own/{done}')",
        ),
        replace("for epoch in range(num_epochs):", "for epoch in range(done // 10, num_epochs):"),
        replace(
            "for step, batch in enumerate(train_dataloader):",
            "for step, batch in enumerate(accelerator.skip_first_batches("
            "train_dataloader, max(0, done - 10 * epoch))):",
        ),
        after(
            "                optimizer.zero_grad()",
            "total = 10 * epoch + max(0, done - 10 * epoch) + step + 1",
            "if total % 4 == 0: accelerator.save_state(f'own/{total}')",
        ),
    ),
)

PROGRAMS = (
    *(MNIST, VAE, WORD_LANGUAGE_MODEL, NANOGPT, DDP, FSDP2),
    *(LIGHTNING, GAN, FABRIC, TRAINER, NLP),
)
