"""`finback grammar`: the commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

grammar = typer.Typer(help="What answers can be kept to.", no_args_is_help=True)


@grammar.callback()
def grammar_() -> None:
    """What answers can be kept to."""


@grammar.command()
def check(
    file: Annotated[
        Path,
        typer.Argument(help="A JSON Schema, a Lark grammar, a regular expression; - reads it."),
    ],
    kind: Annotated[
        str,
        typer.Option(
            help="json_schema, lark, regex, choice or structural_tag; else the file's suffix tells:"
            " .json, .lark, .regex or .txt."
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="Whose vocabulary: 'embedded', a GGUF file or a model folder.")
    ] = "embedded",
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Let go what cannot be enforced, and name it.")
    ] = False,
    sample: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Draw N random answers.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first; the next have the next.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, max=10_000, help="Of an answer drawn.")] = 300,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Is it a whole answer? A file, or the text itself; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Compile a grammar as the sampler does and explain it; exit code 1: it, or a text, is refused."""
    from finback.services.supervisor import cli_grammar

    asked = cli_grammar.Asked(
        model=model,
        is_lenient=lenient,
        num_samples=sample,
        seed=seed,
        max_tokens=max_tokens,
        texts=tuple(text or ()),
    )
    raise typer.Exit(cli_grammar.check(file, kind, asked, as_json=as_json))
