"""Every output format as a model's files would select it, with a tool of each kind to call."""

import json
from dataclasses import dataclass

from finback.shared.codec.dialogue import Conversation, Tool, Turn
from finback.shared.codec.formats.base import Starts
from finback.shared.codec.formats.select import Clues, select_format
from finback.shared.codec.formats.spans import Start
from finback.shared.codec.output import OutputFormat

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer"},
            "options": {"$ref": "#/$defs/options"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {
            "options": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "tags": {"type": "array"}},
                "required": ["unit"],
                "additionalProperties": False,
            }
        },
    },
    strict=True,
)
NOTHING = Tool(name="get")
QUERY = Tool(name="query", kind="custom", description="Runs SQL.")
TOOLS = (WEATHER, NOTHING, QUERY)
ASKED = (Turn(role="user", content="?"),)


@dataclass(frozen=True)
class Family:
    """A format, and how it spells a call."""

    name: str
    open: str
    between: str
    close: str

    def format(
        self, start: Start = "answer", special: frozenset[str] = frozenset()
    ) -> OutputFormat:
        clues = Clues(templates={"default": "tools <think>"}, special=special)
        starts = Starts(dict.fromkeys((None, True, False), start))
        return select_format(clues, starts, self.name)

    def calls(self, *calls: tuple[str, str]) -> str:
        """Calls (name, JSON arguments) as the model writes them."""
        return self.open + self.between.join(self.call(*call) for call in calls) + self.close

    def call(self, name: str, arguments: str) -> str:
        if self.name == "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        if self.name in ("llama3", "json"):
            key = "parameters" if self.name == "llama3" else "arguments"
            return f'{{"name": "{name}", "{key}": {arguments}}}'
        if self.name == "qwen3-coder":
            parameters = "".join(
                f"<parameter={key}>\n{_shown(value)}\n</parameter>\n"
                for key, value in json.loads(arguments).items()
            )
            return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"
        gap = " " if self.name == "deepseek-v4.1" else ""
        elements = "".join(
            f'<｜DSML｜{gap}parameter name="{key}" string="{_flag(value)}">{_shown(value)}'
            f"</｜DSML｜{gap}parameter>\n"
            for key, value in json.loads(arguments).items()
        )
        return f'<｜DSML｜{gap}invoke name="{name}">\n{elements}</｜DSML｜{gap}invoke>\n'

    @property
    def can_follow_text(self) -> bool:
        """May calls come behind text."""
        return self.name not in ("llama3", "json")

    @property
    def fragments(self) -> list[str]:
        """Pieces that nearly, or really, make answers; the first opens a call."""
        return _FRAGMENTS[self.name] + _ANYWHERE


def _flag(value: object) -> str:
    return "true" if isinstance(value, str) else "false"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


FAMILIES = (
    Family("hermes", "", "\n", ""),
    Family("deepseek-v4", "\n\n<｜DSML｜tool_calls>\n", "", "</｜DSML｜tool_calls>"),
    Family("deepseek-v4.1", "\n\n<｜DSML｜ calls>\n", "", "</｜DSML｜ calls>"),
    Family("qwen3-coder", "", "\n", ""),
    Family("llama3", "", "; ", ""),
    Family("json", "", "; ", ""),
)


def conversation(*tools: Tool, **fields: object) -> Conversation:
    """A question with these tools, or all."""
    return Conversation(turns=ASKED, tools=tools or TOOLS, **fields)  # type: ignore[arg-type]  # a test's own fields


def normal(arguments: str) -> object:
    """Arguments as a value, to compare spellings."""
    return json.loads(arguments)


_ANYWHERE = [
    "<think>", "</think>", "</thi", "<", ">", "a", " ", "\n", "\\", '"', "{", "}", "[", "]", ",", ":", ";",
    '{"name": "get", "arguments": {', '{"name": "query", "arguments": {"input": "', '{"name": "query"}',
    '"a": 1', "null", '"name"', '"get"', '"parameters": {}', "\\ud83d", "\\u00e9", '"id": "x"', "é", "\r",
]  # fmt: skip
_FRAGMENTS = {
    "deepseek-v4": [
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="get">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="a" string="true">',
        '<｜DSML｜parameter name="b" string="false">',
        '<｜DSML｜parameter name="c">',
        "</｜DSML｜parameter>",
        "<｜DSML",
        "｜",
        '<｜DSML｜invoke name="query">',
    ],
    "deepseek-v4.1": [
        "<｜DSML｜ calls>",
        "</｜DSML｜ calls>",
        '<｜DSML｜ invoke name="get">',
        "</｜DSML｜ invoke>",
        '<｜DSML｜ parameter name="a" string="true">',
        "</｜DSML｜ parameter>",
        "</｜DSML｜",
        " ",
    ],
    "qwen3-coder": [
        "<tool_call>\n<function=get>",
        "</function>",
        "</tool_call>",
        "<function=query>\n",
        "<parameter=a>\n",
        "<parameter=b>",
        "\n</parameter>",
        "</para",
        "<function=",
        "<tool_call>",
    ],
    "llama3": [
        "<|python_tag|>",
        "<|python",
        "_tag|>",
        '{"name": "get", "parameters": {',
        "}}",
        "[{",
    ],
    "json": ["[", '{"name": "get", "arguments": {}}', "}}", ", {", "; {", "}]"],
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "_call>", "}}\n</tool_call>"],
}
