"""Parsing whole answers in tests: cut anywhere, events of one kind joined."""

from collections.abc import Iterable, Sequence

from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    OutputParser,
    ReasoningPart,
    TextPart,
)

# What a parsed answer comes to: ("text", t), ("reasoning", t), ("call", name, arguments, whole).
Part = tuple[str, ...] | tuple[str, str, str, bool]


def parsed(parser: OutputParser, text: str, cuts: Iterable[int] = ()) -> list[Part]:
    """The parts of `text`, pushed in pieces that end at `cuts`."""
    events: list[OutputEvent] = []
    last = 0
    for cut in [*sorted(cuts), len(text)]:
        events += parser.push(text[last:cut])
        last = cut
    return parts_of([*events, *parser.finish()])


def parts_of(events: Sequence[OutputEvent]) -> list[Part]:
    """Events joined; what the protocol of events forbids fails."""
    parts: list[Part] = []
    name, arguments, index = "", "", -1
    for event in events:
        if isinstance(event, TextPart | ReasoningPart):
            assert not name and event.text
            kind = "text" if isinstance(event, TextPart) else "reasoning"
            if parts and parts[-1][0] == kind:
                parts[-1] = (kind, parts[-1][1] + event.text)
            else:
                parts.append((kind, event.text))
        elif isinstance(event, CallBegin):
            assert not name and event.index == index + 1 and event.call_id
            name, arguments, index = event.name, "", event.index
        elif isinstance(event, CallArguments):
            assert name and event.text and event.index == index
            arguments += event.text
        elif isinstance(event, CallEnd):
            assert name and event.index == index
            parts.append(("call", name, arguments, event.is_complete))
            name = ""
    assert not name
    return parts
