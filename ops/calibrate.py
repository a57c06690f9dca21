"""Query statistics of a model, for TriAttention: ``python -m kvc.calibrate``.

``collect`` reads a text with a Hugging Face model and writes what :func:`kvc.calibration.load` reads; ``convert`` makes
such a file of an official ``.pt`` file; ``report`` says whether the queries in either are concentrated.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch

from . import calibration

if TYPE_CHECKING:
    from rich.console import Console
    from typer import Typer

TABLE_COLUMNS = 90


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _wide(console: "Console") -> "Console":
    from rich.console import Console

    return console if console.width >= TABLE_COLUMNS else Console(width=TABLE_COLUMNS)


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before a model has read a long text for it."""
    import typer

    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    return path


def _picture(path: Path | None) -> Path | None:
    import typer
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path is not None and path.suffix[1:].lower() not in kinds:
        raise typer.BadParameter(
            f"the name of a picture must end in one of {', '.join(kinds)}, got {path.name}"
        )
    return _in_a_folder(path)


def build_app() -> "Typer":
    """The command line; importing its libraries waits until here."""
    try:
        import matplotlib.figure  # noqa: F401
        import safetensors  # noqa: F401
        import transformers
        import typer
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError as missing:
        raise SystemExit(f"kvc.calibrate needs {missing.name}: pip install 'kvc[calibrate]'") from missing

    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Query statistics for TriAttention.")

    @app.command()
    def collect(
        model: Annotated[str, typer.Argument(help="Folder or name of a Hugging Face causal language model.")],
        text: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Plain text, UTF-8.")],
        output: Annotated[
            Path,
            typer.Argument(dir_okay=False, callback=_in_a_folder, help="The .safetensors file to write."),
        ],
        gguf: Annotated[str | None, typer.Option(help="Name of a GGUF file in the model's folder.")] = None,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        dtype: Annotated[DType, typer.Option(help="What the model computes in.")] = DType.auto,
        window: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 4096,
        stride: Annotated[
            int | None, typer.Option(min=1, help="Step between windows. [default: window]")
        ] = None,
        chunk: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 512,
        max_tokens: Annotated[int | None, typer.Option(min=1, help="Read no more than this.")] = None,
        plot: Annotated[
            Path | None, typer.Option(callback=_picture, help="Also draw the report here (PNG, SVG, PDF).")
        ] = None,
    ) -> None:
        """Measure where a model's queries lie before rotation, on a text."""
        try:
            torch.device(device)
        except RuntimeError as error:
            raise typer.BadParameter(f"{device} is no device", param_hint="--device") from error
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise typer.BadParameter("this PyTorch sees no CUDA device", param_hint="--device")
        options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, **options)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype.value, **options)
        loaded = loaded.to(device).eval()
        read = 0

        def counted(lines: Iterable[str]) -> Iterator[str]:
            nonlocal read
            for line in lines:
                read += len(line.encode())
                yield line

        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
        timing = (TimeElapsedColumn(), TimeRemainingColumn())
        with (
            text.open(encoding="utf-8") as file,
            Progress(*columns, *timing, console=Console(stderr=True)) as progress,
        ):
            # The text is tokenized as it is read, so its length in tokens is not known before.
            task = progress.add_task("", total=max_tokens or text.stat().st_size, tokens=0)

            def advance(tokens: int) -> None:
                progress.update(task, completed=tokens if max_tokens else read, tokens=tokens)

            try:
                found = calibration.collect(
                    loaded,
                    calibration.token_stream(tokenizer, counted(file)),
                    window=window,
                    stride=stride,
                    chunk=chunk,
                    max_tokens=max_tokens,
                    on_progress=advance,
                )
            except ValueError as error:
                raise typer.BadParameter(str(error)) from error
            progress.update(task, total=1, completed=1)
        if gguf is not None:
            found = replace(found, model=Path(gguf).stem)
        calibration.save(found, output)
        console = _wide(Console())
        console.print(calibration.report(found, plot))
        console.print(f"{output}: {output.stat().st_size:,} bytes")

    def load(file: Path, model: str | None) -> calibration.Calibration:
        try:
            config = None if model is None else transformers.AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise typer.BadParameter(reason, param_hint="--model") from error
        try:
            return calibration.load(file, config)
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(str(error), param_hint="FILE") from error

    @app.command()
    def convert(
        file: Annotated[
            Path, typer.Argument(exists=True, dir_okay=False, help="A file that load takes, .pt or complete.")
        ],
        output: Annotated[
            Path,
            typer.Argument(dir_okay=False, callback=_in_a_folder, help="The .safetensors file to write."),
        ],
        model: Annotated[str, typer.Option(help="The model it belongs to, which knows its frequencies.")],
    ) -> None:
        """Make an official file one that is complete without its model, for TriAttentionConfig."""
        calibration.save(load(file, model), output)
        typer.echo(f"{output}: {output.stat().st_size:,} bytes")

    @app.command()
    def report(
        file: Annotated[
            Path, typer.Argument(exists=True, dir_okay=False, help="A file of collect, or a .pt file.")
        ],
        model: Annotated[
            str | None,
            typer.Option(help="Refuse the file unless it belongs to this model. Needed for .pt files."),
        ] = None,
        plot: Annotated[
            Path | None, typer.Option(callback=_picture, help="Also draw it here (PNG, SVG, PDF).")
        ] = None,
    ) -> None:
        """Say how concentrated the queries in a file are."""
        _wide(Console()).print(calibration.report(load(file, model), plot))

    return app


if __name__ == "__main__":
    build_app()()
