"""Pipelines that stand alone, against Pillow and Hugging Face's `tokenizers`; texts that are trained on."""

from __future__ import annotations

import csv
import json
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from commands import failed, run
from marks import needs
from models import small_cnn
from onnx import numpy_helper
from representatives import chosen

import onward
from onward.errors import DataError, Error, RecipeError
from onward.recipe.preprocessing.text import PUNCTUATION, WHITESPACE

ALPHABET = "abcdeé" + "ABCDÉ" + "ßЖж中" + " " * 6 + PUNCTUATION[:3] + "-]^\\[_“—…" + WHITESPACE[:3] + "\u3000"


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of few letters, so that words repeat, with spaces and marks of all kinds."""
    rng = random.Random(seed)
    made = ["".join(rng.choices(ALPHABET, k=rng.randrange(60))) for _ in range(count - 4)]
    return [*made, "", " \t\n", "a" * 101, "ab" * 50]


def computed(model: onward.Model, batch: list[str]) -> list[np.ndarray]:
    proto = model.to_proto()
    onnx.checker.check_model(proto, full_check=True)
    given: Any = {"text": np.array(batch, object)}
    return list(ort.InferenceSession(proto.SerializeToString()).run(["input_ids", "attention_mask"], given))


def tokenizer(model: Any, lowercase: bool, punctuation: bool, length: int) -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

    made = Tokenizer(model)
    if lowercase:
        made.normalizer = normalizers.Lowercase()
    marks = [pre_tokenizers.Punctuation()] if punctuation else []
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), *marks])
    edges = {token: made.token_to_id(token) for token in ("[CLS]", "[SEP]") if made.token_to_id(token) is not None}
    if edges:
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=list(edges.items()))
    made.enable_padding(length=length, pad_id=made.token_to_id("[PAD]") or 0)
    made.enable_truncation(length)
    return made


def agree(model: onward.Model, reference: Any, batch: list[str]) -> None:
    ids, mask = computed(model, batch)
    expected = reference.encode_batch(batch)
    for i, one in enumerate(expected):
        assert ids[i].tolist() == one.ids, (batch[i], one.tokens)
        assert mask[i].tolist() == one.attention_mask, batch[i]


@needs("tokenizers")
@pytest.mark.parametrize("lowercase", [False, True])
def test_words_are_those_of_tokenizers(lowercase, tmp_path):
    from tokenizers import models

    words = ["[PAD]", "[UNK]", "a", "b", "ab", "é", ",", "!", "“", "中", "ж", "cd", "ba"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    level = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    options = f"vocabulary={tmp_path}/vocab.txt,length=12,punctuation=true,lowercase={str(lowercase).lower()}"
    made = onward.pipelines.make(f"tokenize:words,{options}")
    agree(made, tokenizer(level, lowercase, True, 12), texts(200))


@needs("tokenizers")
@pytest.mark.parametrize("seed", chosen(range(3), [0]))
def test_pieces_are_those_of_tokenizers(seed, tmp_path):
    """A vocabulary that is learned, in which some letters are missing."""
    from tokenizers import models, trainers

    reference = tokenizer(models.WordPiece(unk_token="[UNK]"), True, True, 24)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    learned = [text.replace("中", "") for text in texts(100, seed + 10)]
    reference.train_from_iterator(learned, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    vocabulary = reference.get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    reference = tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"), True, True, 24)
    options = f"vocabulary={tmp_path}/vocab.json,length=24,punctuation=true,lowercase=true"
    made = onward.pipelines.make(f"tokenize:wordpiece,{options}")
    known = next(token for token in vocabulary if token.isalpha())
    for batch in (texts(200, seed), ["", " "], [known]):  # the latter have nothing to take apart
        agree(made, reference, batch)


@needs("tokenizers")
def test_ascii_text_is_tokenized_as_bert_does(tmp_path):
    """By a file that `tokenizers` writes."""
    from tokenizers import BertWordPieceTokenizer

    rng = random.Random(0)
    batch = [
        "".join(rng.choices("abcABC" + " " * 4 + string.punctuation + "\t\n", k=rng.randrange(50))) for _ in range(100)
    ]
    reference = BertWordPieceTokenizer()
    reference.train_from_iterator(batch[:50], vocab_size=80, show_progress=False)
    reference.save(str(tmp_path / "tokenizer.json"))
    reference = BertWordPieceTokenizer(reference.get_vocab())  # which has the tokens for begin and end
    reference.enable_padding(length=20)
    reference.enable_truncation(20)
    options = f"vocabulary={tmp_path}/tokenizer.json,length=20,punctuation=true,lowercase=true"
    agree(onward.pipelines.make(f"tokenize:wordpiece,{options}"), reference, batch)


@needs("transformers")
def test_bytes_are_those_of_byt5():
    from transformers import ByT5Tokenizer

    made = onward.pipelines.run(onward.pipelines.make("tokenize:bytes,length=24,offset=3,end=1"), {"text": texts(50)})
    expected = ByT5Tokenizer()(texts(50), padding="max_length", max_length=24, truncation=True)
    for name, array in made.items():
        np.testing.assert_array_equal(array, expected[name])


def test_pixels_are_those_of_pillow(tmp_path):
    from PIL import Image

    pictures = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (50 + i, 70, 3), np.uint8)) for i in range(3)]
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    made = onward.pipelines.make("decode | resize:40x48 | center_crop:32 | scale:1 | channels_first")
    arrays = onward.pipelines.run(made, tmp_path)
    assert arrays["image"].shape == (3, 3, 32, 32)
    for picture, array in zip(pictures, arrays["image"], strict=True):
        for channel, plane in zip(picture.split(), array, strict=True):  # as numbers: bytes are rounded on the way
            expected = np.asarray(channel.convert("F").resize((48, 40), Image.Resampling.BILINEAR))[4:36, 8:40]
            np.testing.assert_allclose(plane, expected, atol=1e-3)


def test_proportions_are_kept(tmp_path):
    """The sizes that torchvision computes."""
    from PIL import Image

    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 71), np.uint8))
    picture.save(tmp_path / "x.png")
    made = onward.pipelines.make("decode:Grayscale | resize:32,keep=true")
    (array,) = onward.pipelines.run(made, tmp_path / "x.png")["image"]
    expected = np.asarray(picture.convert("F").resize((32 * 71 // 50, 32), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(array[..., 0], expected, atol=1e-3)
    with pytest.raises(RecipeError, match="different sizes, which make no batch"):
        onward.prepare(small_cnn(), loss="ce", preprocess="resize:8,keep=true center_crop:8")


# ---- joined and taken out --------------------------------------------------------------------------------------------


def test_a_pipeline_is_taken_out_of_training_and_joined_again(tmp_path):
    rng = np.random.default_rng(0)
    batch = {"image": rng.integers(0, 256, (6, 20, 24), np.uint8), "labels": rng.integers(0, 10, 6)}
    operations = "input:shape=[20,24] resize:8 scale normalize:0.5,std=0.25"
    training = onward.prepare(small_cnn(), loss="ce", optimizer="adam:lr=0.01", preprocess=operations)
    training.save(tmp_path / "whole.onnx")
    run("pipeline", f"{tmp_path}/whole.onnx", "-o", f"{tmp_path}/first.onnx", "--rest", f"{tmp_path}/rest.onnx")
    first, rest = (onward.load(tmp_path / name) for name in ("first.onnx", "rest.onnx"))
    assert [value.name for value in first.outputs] == ["image"] == [value.name for value in rest.inputs]
    assert not onward.check(rest) and rest.is_training_model
    run("pipeline", f"{tmp_path}/first.onnx", "--before", f"{tmp_path}/rest.onnx", "-o", f"{tmp_path}/again.onnx")
    np.savez(tmp_path / "raw.npz", image=batch["image"])
    run("pipeline", f"{tmp_path}/first.onnx", "--data", f"{tmp_path}/raw.npz", "-o", f"{tmp_path}/made.npz")
    made = {**np.load(tmp_path / "made.npz"), "labels": batch["labels"]}
    results = []
    for model, given in ((training, batch), (rest, made), (onward.load(tmp_path / "again.onnx"), batch)):
        with onward.engines.start(model) as engine:
            engine.step(given)
            results.append(engine.state())
    for state in results[1:]:
        for name, array in results[0].items():
            np.testing.assert_array_equal(state[name], array)


def test_augmentation_in_the_middle_holds_a_pipeline_in_place():
    given = {"preprocess": "scale normalize:0.5", "augment": "flip"}
    training = onward.prepare(small_cnn(), loss="ce", **given)
    with pytest.raises(RecipeError, match="in the middle of it"):
        onward.pipelines.detach(training)
    first, rest = onward.pipelines.detach(onward.transform.strip(training))
    assert [v.name for v in first.inputs] == ["image/raw"] and [v.name for v in rest.inputs] == ["image"]


# ---- text ------------------------------------------------------------------------------------------------------------

GOOD, BAD, OTHERS = ("good fine great", "bad poor awful", "the story of a town and people in it")


def classifier(words: int) -> onnx.ModelProto:
    """The mean of embeddings: input_ids and attention_mask [N, T] -> logits [N, 2]."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 18]>
        g (int64[N, T] input_ids, int64[N, T] attention_mask) => (float[N, 2] logits) {
            x = Gather(embedding, input_ids) last = Constant<value_ints=[2]>() middle = Constant<value_ints=[1]>()
            m = Cast<to=1>(attention_mask) mask = Unsqueeze(m, last) masked = Mul(x, mask)
            sum = ReduceSum<keepdims=0>(masked, middle) logits = MatMul(sum, weight)
        }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("embedding", (words, 8)), ("weight", (8, 2))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name))
    return model


def reviews(path: Path, count: int = 120) -> Path:
    rng = random.Random(0)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(count):
            words = rng.choices(OTHERS.split(), k=5) + rng.choices((GOOD, BAD)[i % 2].split(), k=2)
            rng.shuffle(words)
            writer.writerow([" ".join(words), ("yes", "no")[i % 2]])
    return path


def test_texts_are_trained_on_and_the_model_takes_them(tmp_path, monkeypatch):
    """The words that are counted; the same on every engine; and plain ONNX Runtime takes text."""
    monkeypatch.chdir(tmp_path)
    data = reviews(tmp_path / "reviews.csv")
    onnx.save(classifier(25), "net.onnx")
    operations = "tokenize:words,vocabulary=25,length=10"
    arguments = ["net.onnx", "--data", str(data), "--loss", "ce", "--optimizer", "adam:lr=0.02", "--epochs", "4"]
    arguments += ["--validation", "0.2", "--preprocess", operations, "--keep-preprocessing", "-o", "trained.onnx", "-q"]
    run("train", *arguments, "--run", "first")
    assert onward.Run("first").results["accuracy"] == 1
    session = ort.InferenceSession("trained.onnx")
    given: Any = {"text": np.array(["a good story", "bad people"], object)}
    assert session.run(None, given)[0].argmax(1).tolist() == [1, 0]  # classes are sorted: no, yes
    losses = []
    batch = {"text": np.array(["a good story", "awful é people"], object), "labels": np.array([1, 0])}
    for name in ("onnxruntime", "numpy"):
        with onward.engines.start(onward.Run("first").model, engine=name) as engine:
            losses.append([float(engine.step(batch)["loss"]) for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_with_a_vocabulary_file_is_started_again_from_elsewhere(tmp_path, monkeypatch):
    """`config.yaml` names the file from the root on, whether a text or a mapping named it."""
    monkeypatch.chdir(tmp_path)
    reviews(tmp_path / "reviews.csv")
    onnx.save(classifier(25), "net.onnx")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", *f"{GOOD} {BAD} {OTHERS}".split()][:25]) + "\n")
    (tmp_path / "elsewhere").mkdir()
    options = {"by": "words", "vocabulary": "vocab.txt", "length": 10}
    text = "tokenize:" + ",".join(f"{name}={value}" for name, value in options.items())
    for number, given in enumerate((text, [{"name": "tokenize", **options}])):
        monkeypatch.chdir(tmp_path)
        first = onward.train("net.onnx", "reviews.csv", loss="ce", preprocess=given, run=f"first{number}", quiet=True)
        config = Path(first.path.resolve() / "config.yaml")
        monkeypatch.chdir(tmp_path / "elsewhere")
        onward.train(config=config, run=f"second{number}", quiet=True)
        assert str(tmp_path / "vocab.txt") in config.read_text()


@needs("pyarrow")
def test_columns_of_text_are_read_from_every_kind_of_file(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pipe = onward.pipelines.make([{"name": "tokenize", "vocabulary": ["[PAD]", "[UNK]", "a", "b"], "length": 3}])
    expected = np.array([[2, 3, 0], [1, 2, 2], [3, 0, 0]])
    column = ["a b", "é a a", "b"]
    table = pa.table({"text": column, "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "x.csv").write_text("text,n\n" + "".join(f"{text},{i}\n" for i, text in enumerate(column)))
    sources: list[Any] = [tmp_path / f"x.{kind}" for kind in ("csv", "parquet", "arrow")]
    sources += [{"text": column}, {"text": np.array(column)}, {"text": np.array(column, object)}]
    for source in sources:
        np.testing.assert_array_equal(onward.pipelines.run(pipe, source)["input_ids"], expected)
    many = "\n".join(["text", *(f"a {i}" for i in range(11_000)), "b a"])  # more than there are classes
    (tmp_path / "many.csv").write_text(many)
    ids = onward.pipelines.run(pipe, tmp_path / "many.csv")["input_ids"]
    assert ids.shape == (11_001, 3) and ids[0].tolist() == [2, 1, 0] and ids[-1].tolist() == [3, 2, 0]


def test_what_is_wrong_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.txt").write_text("[PAD]\n[UNK]\na\na\n")
    (tmp_path / "w.txt").write_text("a\nb\n")
    cases = {
        "tokenize:words,length=3": "needs a vocabulary",
        "tokenize:words,vocabulary=v.txt,length=3": "more than once",
        "tokenize:words,vocabulary=w.txt,length=3": r"no token `\[UNK\]`",
        "tokenize:words,vocabulary=none.txt,length=3": "cannot read the vocabulary",
        "tokenize:words,vocabulary=9,length=3": "`vocabulary=9` needs data",
        "tokenize:bpe,vocabulary=w.txt,length=3": "`tokenize` has no `by=bpe`",
        "tokenize:words,vocabulary=w.txt,length=0": "`length` of `tokenize` is `0`",
        "tokenize:words,vocabulary=w.txt,length=3 scale": "cannot be combined",
        "tokenize:bytes,length=3,lowercase=true": "`tokenize:bytes` takes no",
        "tokenize:bytes,length=3,end=stop": "`stop` is not a number",
        "tokenize:words,vocabulary=w.txt,length=3,lowercase=yes": "`lowercase` of `tokenize` is `yes`",
        "tokenize:words,vocabulary=w.txt,length=3,offset=2": "`offset` is for `tokenize:bytes`",
        "scale decode": "`decode` must come first",
        "blur": "unknown preprocessing `blur`",
    }
    for operations, message in cases.items():
        with pytest.raises(Error, match=message):
            onward.pipelines.make(operations)
    with pytest.raises(RecipeError, match="`decode` is for a separate pipeline"):
        onward.prepare(small_cnn(), loss="ce", preprocess="decode scale")
    with pytest.raises(DataError, match="no column can be input `text`"):
        words = {"name": "tokenize", "vocabulary": ["[PAD]", "[UNK]"], "length": 3}
        onward.pipelines.run(onward.pipelines.make([words]), {"x": np.zeros(3)})
    assert "npz output needs data" in failed("pipeline", "scale", "-o", "x.npz", code=2)[0]
