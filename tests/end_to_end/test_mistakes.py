"""What people type and do not mean: one row for a mistake, with what the message and the hint say."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer.main
from models import digits_mlp
from typer.testing import CliRunner

import onward
from onward.cli.app import BUG
from onward.cli.commands import app

TRAIN = "train digits.onnx --data d.npz --loss ce"

# Arguments, a part of the message, a part of the hint. Usage ends with 2, everything else with 1.
USAGE = [
    ("prepare", "missing argument `MODEL`", "--list losses"),
    ("prepare digits.onnx", "missing option `--loss`", "--list losses"),
    ("prepare digits.onnx --los ce", "no such option: --los", "did you mean `--loss`"),
    ("prepare digits.onnx --loss ce --accumulate x", "`--accumulate`: it must be an integer", "prepare --help"),
    ("prepare digits.onnx --loss ce --data x", "`x` is not one of `auto`", "prepare --help"),
    ("prepare --list x", "`x` is not one of", "prepare --help"),
    ("prepair", "no such command `prepair`", "did you mean `prepare`"),
    ("check", "missing argument `MODEL`", "check --help"),
    ("describe", "missing argument `MODEL`", "describe --help"),
    ("describe digits.onnx more.onnx", "unexpected argument `more.onnx`", "onward describe MODEL"),
    ("set training.onnx", "missing a setting", "--list"),
    ("set training.onnx step", "`step` does not have the form", "group0/lr"),
    ("set training.onnx step=1 step=2", "`step` is given twice", ""),
    ("set training.onnx --shape image", "`--shape image` does not have the form", "--shape image=N,3,224,224"),
    ("rename training.onnx logits", "`logits` does not have the form", "="),
    ("rename training.onnx a=b=c", "`a=b=c` is ambiguous: `a` and `b=c` or `a=b` and `c`", "in Python"),
    ("gradient digits.onnx --of logits", "missing option `--wrt`", "gradient --help"),
    ("opset training.onnx 0", "`VERSION`: it must be at least 1", "opset --help"),
    ("data training.onnx --to x", "`x` is not one of", "data --help"),
    ("refresh digits.onnx", "missing option `--training`", "refresh --help"),
    ("--what", "no such option: --what", ""),
    ("train", "missing argument `MODEL`", "--resume RUN"),
    ("train digits.onnx", "missing option `--data`", "train --help"),
    ("train digits.onnx d.npz --loss ce", "unexpected argument `d.npz`", "onward train MODEL --data DATA"),
    (f"{TRAIN} --optimizer adam lr=1", "unexpected argument `lr=1`", "usage"),
    (f"{TRAIN} -o", "option `-o` requires an argument", "onward train --help"),
    (f"{TRAIN} -b 1.5", "it must be an integer", "train --help"),
    (f"{TRAIN} --last trop", "`trop` is not one of", "did you mean `drop`?"),
    ("train digits.onnx --data d.npz --learning-rate 1", "no such option: --learning-rate", "did you mean `--lr`?"),
    (f"{TRAIN} --qqqq", "no such option: --qqqq", "see `onward train --help`"),
    (f"{TRAIN} --column image=a --column image=b", "given twice: `a` and `b`", "once"),
    (f"{TRAIN} --column image", "`--column image` does not have the form", "--column image=pixels"),
    (f"{TRAIN} --column image=", "`--column image=` does not have the form", "--column image=pixels"),
    (f"{TRAIN} --find-lr -o x.onnx", "no effect with `--find-lr`", "leave `-o` out"),
    ("train --resume run --loss ce", "`--loss` has no effect with --resume", "keeps its options"),
    ("train --resume run --reset", "`--reset` has no effect with --resume", "keeps its options"),
    ("convert training.onnx", "missing option `--to` for `training.onnx`", "--to torch"),
    ("convert training.onnx --to pytorch", "`pytorch` is not one of", "did you mean `torch`?"),
    ("convert training.onnx --to torch -o x.keras", "ends with .pt, not `x.keras`", "x.pt"),
    ("lower training.onnx --part forward", "`forward` is not one of", "lower --help"),
    ("lower training.onnx --all notes.txt", "`notes.txt` is a file", "--all FOLDER"),
    ("lower training.onnx --all x --part step", "`--all` and `--part` exclude each other", "leave one"),
    ("page digits.onnx", "missing option `--output` / `-o`", "page --help"),
    ("pipeline scale --rest x.onnx", "`--rest` needs a model", "onward pipeline MODEL.onnx --rest FILE"),
    ("verify training.onnx --updates 0", "`--updates`: it must be at least 1", "verify --help"),
    ("verify training.onnx --tolerance nan", "`--tolerance`: it must be at least 0", "verify --help"),
    ("check-gradients digits.onnx --order 3", "`--order`: it must be at most 2", "check-gradients --help"),
    ("engines x", "unexpected argument `x`", "onward engines [OPTIONS]"),
    ("engines --jso", "no such option: --jso", "did you mean `--json`?"),
    ("report", "missing argument `RUN`", "report --help"),
    ("evaluate digits.onnx", "missing option `--data`", "evaluate --help"),
    ("predict", "missing argument `MODEL`", "predict --help"),
    ("set training.onnx --list step=1", "`--list` sets nothing", "leave it out"),
    ("set group0/lr=1 training.onnx", "`training.onnx` does not have the form", "the model comes first"),
    ("rename training.onnx image=a image=b", "`image` is given twice", "pass each name once"),
    ("prepare digits.onnx --loss ce -o x.pt", "cannot write an ONNX model to `x.pt`", "onward convert"),
    ("prefix digits.onnx", "missing argument `PREFIX`", "prefix --help"),
    ("merge digits.onnx", "missing argument `SECOND`", "merge --help"),
    ("merge a.onnx b.onnx --connect x=y --connect x=z", "`x` is given twice", "pass each name once"),
    ("extract digits.onnx logits", "unexpected argument `logits`", "onward extract MODEL"),
    ("inline digits.onnx --functions x", "no such option: --functions", "did you mean `--function`?"),
    ("data digits.onnx", "missing option `--to`: one of none, data, safetensors", "data --help"),
    ("strip", "missing argument `MODEL`", "strip --help"),
]
WRONG = [
    ("pipeline resise:3", "unknown preprocessing `resise`", "did you mean `resize`?"),
    ("prepare digits.onnx --loss ce --quantize int7", "unknown type to quantize to `int7`", "did you mean `int8`"),
    (
        "train digits.onnx --data d.npz --from c --reset",
        "`reset` has no effect with a checkpoint",
        "checkpoint determines",
    ),
    ("set training.onnx a=b=1", "no initializer `a=b`", "fc1.weight"),
    ("train training.onnx --data d.npz --lr 1", "the model is already a training model, so `lr` has no", "strip"),
    (f"{TRAIN} --validation 20%", "is not a fraction", "write `validation=0.2`"),
    (f"{TRAIN} --validation nan", "is not a fraction between 0 and 1", "validation=0.1"),
    (f"{TRAIN} --validation 2", "`validation=2` is not a fraction between 0 and 1", "validation=0.1"),
    ("prepare digits.onnx --loss ce --init zeros --init ones", "`init` has the pattern `*` twice", "write it once"),
    ("describe digit.onnx", "the file `digit.onnx` does not exist", "did you mean `digits.onnx`"),
    ("describe .", "`.` is a folder", ".onnx"),
    ("check nothing.onnx", "the file `nothing.onnx` does not exist", ""),
    ("check training.onnx --for abacus", "`abacus`", "onnxruntime"),
    ("prepare digits.onnx --loss cross", "unknown loss `cross`", "did you mean"),
    ("prepare digits.onnx --loss ce --optimizer adamv", "unknown optimizer `adamv`", "did you mean"),
    ("prepare digits.onnx --loss ce --optimizer sgd:learning_rate=1", "no option `learning_rate`", ""),
    ("prepare digits.onnx --loss ce --optimizer sgd:lr", "`lr` in `sgd:lr`", "write `adamw:lr"),
    ("prepare digits.onnx --loss ce --schedule cosine", "needs `steps`", "cosine:steps=100"),
    ("prepare digits.onnx --loss ce --freeze fc3.*", "`fc3.*` matches no", "`fc2.bias`"),
    ("prepare digits.onnx --loss ce --group fc3.*:lr=1", "`fc3.*` matches no parameter", ""),
    ("prepare digits.onnx --loss logit=ce", "no value `logit`", "`logits`"),
    ("prepare digits.onnx --loss ce --clip -1", "the limit of `clip=norm` is -1, but must be positive", "`norm:1`"),
    ("prepare digits.onnx --loss ce --accumulate 0", "`accumulate` is 0, but must be at least 1", ""),
    ("prepare digits.onnx --loss ce --ema 2", "`ema` is 2, but must be at least 0 and less than 1", ""),
    ("prepare digits.onnx --loss ce --loss-scale big", "`big`", ""),
    ("prepare digits.onnx --loss loss.onnx", "the file `loss.onnx` does not exist", ""),
    ("prepare training.onnx --loss ce", "already carries its training", "--append"),
    ("prepare digits.onnx --loss ce -o nowhere/t.onnx", "no folder `nowhere`", "mkdir -p"),
    ("gradient digits.onnx --of logits --wrt fc3.*", "`fc3.*` matches no floating-point value", "did you mean"),
    ("gradient digits.onnx --of nothing --wrt fc1.*", "`nothing`", ""),
    ("set digits.onnx step=1", "the model has no step 0", "onward prepare"),
    ("set training.onnx lr=1", "the model has no initializer `lr`", "`group0/lr`"),
    ("set training.onnx group0/lr=fast", "`group0/lr` is double, and `fast` is not", "1e-3"),
    ("set training.onnx group0/lr=true", "`group0/lr` is double, and `true` is not", "1e-3"),
    ("set training.onnx group0/lr=[1,2]", "`group0/lr` has shape [], not [2]", ""),
    ("set training.onnx step=1.5", "`step` is int64, which cannot hold `1.5`", "integer"),
    ("set training.onnx step=1e300", "`step` is int64, which cannot hold `1e300`", "integer"),
    ("set training.onnx step=99999999999999999999", "`step` is int64, and", "integer"),
    ("set training.onnx fc1.weight=0", "`fc1.weight` is a weight with 2,048 elements", "model.set"),
    ("set training.onnx step=1 --step 3", "the model has no step 3", ""),
    ("set digits.onnx --shape imag=N,64", "no input `imag`", "did you mean `image`"),
    ("set digits.onnx --shape image=N,65", "has the shape", "change only symbolic sizes"),
    ("set digits.onnx --shape image=N,", "cannot have the shape [N, ]", "numbers or names"),
    ("rename training.onnx fc9.weight=x", "unknown value `fc9.weight`", "did you mean"),
    ("rename training.onnx fc1.weight=fc2.weight", "already the name of another value", "choose another"),
    ("merge digits.onnx digits.onnx", "both models have values named", "--prefix"),
    ("merge digits.onnx digits.onnx --connect a=b", "the first model has no output `a`", ""),
    ("extract training.onnx --to nothing", "unknown value `nothing`", ""),
    ("opset digits.onnx 9999", "cannot convert the model to operator set 9999", ""),
    ("plan digits.onnx --memory much", "`memory` is not an amount: `much`", "80GB"),
    ("plan digits.onnx --devices 12 --strategy hybrid", "the 12 devices are not whole machines of 8", "--per-machine"),
    ("plan digits.onnx --devices 4 --strategy ddp -b 6", "a batch of 6 cannot be divided among 4", "--batch-size 4"),
    ("plan training.onnx --optimizer sgd", "has its recipe already: `optimizer`", "onward strip"),
    ("plan training.onnx --step 1", "the model has no step 1", ""),
    ("reset digits.onnx", "the model has no step 0", "onward prepare"),
    ("reset training.onnx --seed 7", "draws no random numbers", "leave it out"),
    ("refresh training.onnx --training digits.onnx", "the second model has no training", ""),
    ("describe folder", "`folder` is a folder, not a file", ".onnx"),
    ("describe run", "`run` is a folder, not a file", "`run/training.onnx`"),
    ("describe empty.onnx", "`empty.onnx` is empty", "download"),
    ("describe notes.txt", "`notes.txt` is not an ONNX model but a text file", ".onnx"),
    ("prepare weights.pt --loss ce", "is not an ONNX model but a PyTorch file", "onward convert"),
    ("describe model.h5", "`model.h5` is not a whole HDF5 file", ""),
    ("train d.npz --data digits.onnx --loss ce", "`d.npz` is not an ONNX model but a NumPy file", "--data"),
    ("describe cut.onnx", "not valid protobuf", "compare its size"),
    ("describe nowhere/digits.onnx", "the file `nowhere/digits.onnx` does not exist", "check the path"),
    ("describe training.onnx --graph nowhere/x.svg", "nowhere/x.svg", ""),
    ("check folder", "`folder` holds no run", "onward train"),
    ("check weights.pt", "PyTorch file", "onward.from_torch"),
    ("train digits.onnx --data nope.npz --loss ce", "nope.npz", "path"),
    ("train digits.onnx --data d.npz", "missing `loss`", "--loss cross_entropy"),
    ("train digits.onnx --data d.npz --loss CE", "unknown loss `CE`", "did you mean `ce`"),
    (f"{TRAIN} --batch-size 0", "`batch_size` is 0, but must be at least 1", ""),
    (f"{TRAIN} --batch-size -1", "`batch_size` is -1", ""),
    (f"{TRAIN} --epochs -1", "`epochs` is -1, but must be at least 0", ""),
    (f"{TRAIN} --threads 0", "`threads` is 0", ""),
    (f"{TRAIN} --threads 99999999999999999999", "but must be at least 1 and at most", ""),
    (f"{TRAIN} --seed -1", "`seed` is -1", ""),
    (f"{TRAIN} --save-every nan", "`save_every` is nan", ""),
    (f"{TRAIN} --patience 0 --validation 0.5", "`patience` is 0", ""),
    (f"{TRAIN} --patience 2", "`patience` needs", "--validation 0.1"),
    (f"{TRAIN} --clip nan", "`clip` is nan", ""),
    (f"{TRAIN} --loss-scale 0", "`loss_scale` is 0, but must be positive", ""),
    (f"{TRAIN} --lr-decay 0", "`lr_decay` is 0, but must be positive", ""),
    (f"{TRAIN} --lr -1", "`lr` of optimizer `adamw` is -1", ""),
    (f"{TRAIN} --lr 1 --optimizer sgd:lr=1", "given twice", "leave one"),
    (f"{TRAIN} --lr 1 --find-lr", "is searched", "--lr"),
    (f"{TRAIN} --engine pytorch", "unknown engine `pytorch`", "`torch`"),
    (f"{TRAIN} --metric acuracy", "unknown metric `acuracy`", "`accuracy`"),
    (f"{TRAIN} --new-head 0", "`classes` is 0", ""),
    (f"{TRAIN} --new-head class=3", "no option `class`", "did you mean `classes`?"),
    (f"{TRAIN} --new-head 3,layer=x", "no layer `x`", "fc1"),
    (f"{TRAIN} --lora 4,targets=nope", "`nope` matches no weight", "fc1"),
    (f"{TRAIN} --recompute nope", "nothing to compute again", "there are `fc1`"),
    (f"{TRAIN} --recompute -1", "every -1", "above 0"),
    (f"{TRAIN} --keep-preprocessing", "no preprocessing to keep", "--preprocess"),
    (f"{TRAIN} --run notes.txt", "could not create the run folder `notes.txt`", "--run FOLDER"),
    (f"{TRAIN} -o nowhere/x.onnx", "no folder `nowhere`", "mkdir -p"),
    (f"{TRAIN} -o digits.onnx", "`digits.onnx` is the input model", "--force"),
    ("train --resume folder", "`folder` holds no run", "onward train"),
    ("prepare digits.onnx --loss ce --optimizer adam:lr=-1", "`lr` of optimizer `adam` is -1", ""),
    ("prepare digits.onnx --loss ce --optimizer adam:lr=nan", "`lr` of optimizer `adam` is nan", ""),
    ("prepare digits.onnx --loss ce --optimizer adam:lr=1,lr=2", "has `lr` twice", "write it once"),
    ("prepare digits.onnx --loss ce --optimizer adam(lr=1)", "is not of the form `name:option=value`", "`adam:lr=1`"),
    ("prepare digits.onnx --loss ce --optimizer adam:epsilon=1", "no option `epsilon`", "did you mean `eps`?"),
    ("prepare digits.onnx --loss ce --schedule cosine:steps=0", "`steps` of schedule `cosine` is 0", ""),
    ("prepare digits.onnx --loss ce --schedule cosine:steps=ten", "is `ten`, which is not a number", ""),
    (
        "prepare digits.onnx --loss ce --init nope=zeros",
        "`nope` of `init` matches no trained parameter",
        "`fc1.weight`",
    ),
    ("prepare digits.onnx --loss ce --group a=1", "has no pattern of parameters", "write `*.bias:a=1`"),
    (
        "prepare digits.onnx --loss ce --group fc1.*:lr=1 --group fc1.*:lr=2",
        "groups before `fc1.*` match all its parameters",
        "first",
    ),
    ("prepare digits.onnx --loss ce --group qqqq:lr=1", "`qqqq` matches no parameter", "there are `fc1.weight`"),
    ("prepare digits.onnx --loss ce --freeze qqqq", "`qqqq` matches no", "there are `fc1.weight`"),
    ("prepare digits.onnx --loss ce --freeze *", "nothing is left to train", "--params"),
    ("prepare digits.onnx --loss ce --preprocess image=scale --preprocess image=scale", "given twice", "once"),
    ("prepare digits.onnx --loss nope --json", "unknown loss `nope`", "cross_entropy"),
    ("gradient digits.onnx --of qqqq --wrt image", "unknown value `qqqq`", "there are `image`"),
    ("gradient digits.onnx --of logits --wrt qqqq", "`qqqq` matches no floating-point value", "there are `image`"),
    ("lower training.onnx --steps 3", "the model has no step `3`", "the steps are training"),
    (
        "train training.onnx --data digits.npz --steps critic:2",
        "the model has no step `critic`",
        "the steps are training",
    ),
    ("train training.onnx --data digits.npz --noise z=normal", "the model has no input `z` for noise", ""),
    ("lower digits.onnx --part step", "the model has no step 0", "onward prepare"),
    ("convert nope.pt --json", "the file `nope.pt` does not exist", ""),
    ("train training.onnx --data digits.npz --steps 5", "the model has no step `5`", "of a run: `--epochs`"),
    ("train digits.onnx --data d.npz --loss ce --schedule cosine --epochs 5 -b 4", "needs `steps`", "cosine:steps=10`"),
    (
        "train digits.onnx --data d.npz --loss ce --column y=labels",
        "no input `y`",
        "calls it `labels`: --column labels",
    ),
    ("train digits.onnx --data d.npz --loss mse", "no column can be input `target`", "if `labels` holds class labels"),
    ("convert notes.txt --to torch", "`notes.txt` has no known checkpoint format", "that a framework saved"),
    ("convert model.h5", "`model.h5` is not a whole HDF5 file", ""),
    ("diff training.onnx nope.pt", "`nope.pt` does not exist", "check the path"),
    ("verify digits.onnx --json", "the model has no step 0", "onward prepare"),
    ("verify training.onnx --engine onxruntime", "unknown engine `onxruntime`", "did you mean `onnxruntime`?"),
    ("verify training.onnx --inputs nope.npz", "cannot read `nope.npz`", "path"),
    ("check-gradients digits.onnx --of qqqq", "the model has no value `qqqq`", "there are"),
    ("check-gradients digits.onnx --inputs notes.txt", "`notes.txt` is not an .npz file", "numpy.savez"),
    ("report folder", "`folder` holds no run", "onward report runs/NAME"),
    ("set training.onnx group0/lr=-1", "`group0/lr` is -1, but must be at least 0", ""),
    ("set training.onnx group0/lr=nan", "`group0/lr` is nan, but must be at least 0", ""),
    ("set training.onnx group0/beta1=2", "`group0/beta1` is 2, but must be", ""),
    ("set training.onnx schedule/steps=0", "`schedule/steps` is 0, but must be positive", ""),
    ("set training.onnx step=-1", "`step` is -1, but must be at least 0", ""),
    ("set training.onnx qqqq=1", "the model has no initializer `qqqq`", ""),
    ("rename digits.onnx qqqq=x", "unknown value `qqqq`", "there are `image`"),
    ("prefix nope.onnx a/", "the file `nope.onnx` does not exist", ""),
    ("inline training.onnx --function nope", "`nope` matches no function", "there are `onward."),
    ("set training.onnx fc2.bias=[NaN,0,0,0,0,0,0,0,0,0]", "`fc2.bias` is nan, but must be finite", ""),
    ("inline nope.onnx", "the file `nope.onnx` does not exist", ""),
    ("extract digits.onnx --to qqqq", "unknown value `qqqq`", "there are `image`"),
    ("data nope.onnx --to none", "the file `nope.onnx` does not exist", ""),
    ("strip notes.txt", "a text file", ".onnx"),
]


COMMAND = typer.main.get_command(app)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what people have around: models, data, and what is neither."""
    path = tmp_path_factory.mktemp("mistakes")
    onnx.save(digits_mlp(), path / "digits.onnx")
    onward.prepare(digits_mlp(), loss="ce", optimizer="adamw", schedule="cosine:steps=9").save(path / "training.onnx")
    rng = np.random.default_rng(0)
    np.savez(path / "d.npz", image=rng.random((8, 64), np.float32), labels=rng.integers(0, 3, 8))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("weights/data.pkl", "")
    contents = {
        "empty.onnx": b"",
        "notes.txt": b"to do: train\n",
        "weights.pt": archive.getvalue(),
        "model.h5": b"\x89HDF\r\n\x1a\n" + bytes(32),
        "cut.onnx": (path / "digits.onnx").read_bytes()[:5000],
    }
    for name, content in contents.items():
        (path / name).write_bytes(content)
    (path / "folder").mkdir()
    (path / "run").mkdir()
    (path / "run" / "training.onnx").write_bytes(b"")
    return path


@pytest.mark.parametrize(("arguments", "message", "hint"), [*USAGE, *WRONG])
def test_a_mistake_is_explained(
    arguments: str, message: str, hint: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("typer.testing._get_command", lambda _: COMMAND)  # built once, and not for every row
    before = {path: path.stat().st_mtime_ns for path in home.rglob("*")}
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == (2 if (arguments, message, hint) in USAGE else 1), result.output
    assert not result.stdout  # where a program reads, also of those that want JSON
    said = re.fullmatch(r"error: (.+?)\n(?:hint:  (.+)\n)?", result.stderr, re.DOTALL)
    assert said and BUG not in result.stderr, result.stderr
    assert message in said[1] and hint in (said[2] or ""), result.stderr
    assert said[1][:2].islower() or said[1].startswith("`"), said[1]
    assert {path: path.stat().st_mtime_ns for path in home.rglob("*")} == before


def test_there_is_a_mistake_for_every_command() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    made = {arguments.split()[0] for arguments, *_ in (*USAGE, *WRONG)}
    assert {name.rstrip("_") for name in commands} <= made
