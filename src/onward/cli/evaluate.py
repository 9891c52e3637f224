"""`onward evaluate` and `onward predict`: a model on data, after the training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onward.cli import options
from onward.cli.app import BUILD, Misuse, command
from onward.cli.console import print_fields, print_json, print_rows, remark, say
from onward.cli.options import argument, option, options_from, select_given, source_of
from onward.cli.output_files import refuse_to_overwrite
from onward.options import EvaluateOptions, PredictOptions

if TYPE_CHECKING:
    from onward.training.evaluation import Evaluation

_Model = Annotated[Path, argument("MODEL", "An .onnx file, or the folder of a run.")]
_Quiet = Annotated[bool, option("--quiet -q", None, "Hide the progress.")]
_MOST_ROWS, _MOST_COLUMNS = 40, 12
"""Classes in a printed table, and in a printed confusion matrix."""


@command(
    BUILD,
    "onward evaluate runs/digits --data digits-test.npz",
    "onward evaluate best.onnx --data photos/test --worst 20",
    "onward evaluate best.onnx --data test.csv --against original.onnx",
    "onward evaluate resnet.onnx --data photos/ --task classification --class cat --class dog --preprocess \\\n"
    "      'resize:size=224 scale normalize:imagenet'",
    "onward evaluate best.onnx --data test.parquet --metric auc --metric top_k:k=3 --json",
    usage="MODEL --data DATA [OPTIONS]",
    **options_from(EvaluateOptions),
)
def evaluate(model: _Model, *, quiet: _Quiet = False, as_json: options.Json = False, **typed: Any) -> None:
    """Evaluate a model on labeled data: metrics, classes, confusion matrix, worst samples.

    Task, class names, columns and preprocessing come from the file if `onward train` wrote it. For
    other files, `--loss` or `--task` says what the output is.
    """
    settings = _settings(EvaluateOptions, model, typed, "evaluate")
    from onward.training.evaluation import evaluate

    evaluation = evaluate(**settings, quiet=quiet or as_json)
    if as_json:
        print_json(evaluation.to_json())
        return
    for note in evaluation.notes:
        remark(note)
    _show(evaluation, settings.get("against"))


@command(
    BUILD,
    "onward predict best.onnx --data photos/new -o predictions.csv",
    "onward predict runs/digits --data new.npz --which last -o predictions.parquet",
    "onward predict best.onnx --data customers.csv --keep id -o -",
    "onward predict best.onnx --data cat.png",
    "onward predict encoder.onnx --data texts.parquet --raw -o vectors.npz",
    usage="MODEL --data DATA [OPTIONS]",
    **options_from(PredictOptions),
)
def predict(
    model: _Model,
    *,
    output: Annotated[
        str,
        option("--output -o", "FILE", "A .csv, .jsonl, .parquet or .npz file, or `-` for CSV on standard output."),
    ] = "-",
    force: options.Force = False,
    quiet: _Quiet = False,
    **typed: Any,
) -> None:
    """Predict classes, probabilities or numbers for data without labels.

    Rows are written while they are computed, so memory does not grow with the data. Images need no
    class folders; their file names identify the rows.
    """
    settings = _settings(PredictOptions, model, typed, "predict")
    from onward.model.storage.transaction import target_of
    from onward.training.prediction import predict
    from onward.training.prediction_files import writer_for

    writer_for(output)
    if output != "-":
        target_of(output)
        if not force:
            refuse_to_overwrite(Path(output))
    predictions = predict(**settings, quiet=quiet)
    for note in predictions.notes:
        remark(note)
    predictions.save(output)
    if output != "-":
        remark(f"wrote {output}")


def _settings(kind: type, model: Path, typed: dict[str, Any], name: str) -> dict[str, Any]:
    asked = select_given(kind, typed)
    if "data" not in asked:
        raise Misuse("missing option `--data`", f"see `onward {name} --help`")
    return {**asked, "model": str(model), "data": source_of(typed["data"])}


def _show(evaluation: Evaluation, against: str | None = None) -> None:
    from onward.inspect.formatting import quantity

    compared = "" if against is None else f", before: {against}"
    say(f"{evaluation.model}: {evaluation.task or 'loss only'}, {quantity(evaluation.rows, 'row')}{compared}")
    if evaluation.changes:
        rows = [("metric", "before", "after", "change", "95 % interval")]
        for name, change in evaluation.changes.items():
            interval = "" if change.low is None else f"{change.low:+.4g} to {change.high:+.4g}"
            rows.append((name, _number(change.before), _number(change.after), f"{change.change:+.4g}", interval))
        _print_table(rows)
    else:
        say()
        print_fields([(name, _number(value)) for name, value in evaluation.metrics.items()], indent="  ")
    if evaluation.residuals:
        say("\nresiduals (predicted - label)")
        print_fields([(name, _number(value)) for name, value in evaluation.residuals.items()], indent="  ")
    if evaluation.per_class:
        columns = list(next(iter(evaluation.per_class.values())))
        shown = list(evaluation.per_class.items())[:_MOST_ROWS]
        _print_table([("class", *columns), *((name, *(_number(row[c]) for c in columns)) for name, row in shown)])
        _say_rest(len(evaluation.per_class) - len(shown))
    _show_confusion(evaluation)
    if evaluation.worst:
        columns = list(evaluation.worst[0])
        worst = [[_number(entry[c]) for c in columns] for entry in evaluation.worst]
        _print_table([(f"worst: {columns[0]}", *columns[1:]), *worst])


def _show_confusion(evaluation: Evaluation) -> None:
    """Print a small confusion matrix, or the most frequent confusions of a large one."""
    table = evaluation.confusion
    if table is None or table.ndim != 2:
        return
    names = list(evaluation.per_class)
    if len(table) <= _MOST_COLUMNS:
        _print_table([("label \\ chosen", *names), *((n, *map(str, r)) for n, r in zip(names, table, strict=True))])
        return
    pairs = [(int(n), i, j) for (i, j), n in _entries(table).items() if i != j]
    shown = sorted(pairs, reverse=True)[:10]
    _print_table([("label", "chosen", "times"), *((names[i], names[j], str(count)) for count, i, j in shown)])
    _say_rest(len(pairs) - len(shown))


def _entries(table: Any) -> Mapping[tuple[int, int], int]:
    return {(i, j): table[i, j] for i, j in zip(*table.nonzero(), strict=True)}


def _print_table(rows: Any) -> None:
    say()
    print_rows([("  " + row[0], *row[1:]) for row in rows], styles=("bold",))


def _say_rest(count: int) -> None:
    if count > 0:
        say(f"  and {count:,} more: `--json` prints all")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
