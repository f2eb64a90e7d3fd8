"""The template environment: Hugging Face's semantics, and its limits."""

import datetime
import time

import pytest

from finback.shared.codec.chat_template import ChatTemplate
from finback.shared.errors import ConfigError, InvalidRequest

USER = [{"role": "user", "content": "hi"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(USER, variables=variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}",
         "<s>hi</s>"),
        ("{% if true %}\n  x\n{% endif %}\n", "  x\n"),  # trim_blocks
        ("    {% if true %}x{% endif %}", "x"),  # lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{{ loop.index }}{% if not loop.last %},{% endif %}{% endfor %}",
         "1,2,3"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now(tz=None).year)),
        ("{{ 'a' ~ 1 ~ 'b' }}{{ 'x' * 3 }}{{ 'abc' | replace('b', 'd') }}", "a1bxxxadc"),
        ("{% generation %}z{% endgeneration %}", "z"),
        ("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue"),
        (("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
         "{{ ns.n }}"), "1"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('q') }}", "[q]"),
    ],
)  # fmt: skip
def test_renders(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].content + 5 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        (
            "{% set x = range(99999) %}{% for i in x %}{% for j in x %}{% for k in x %}"
            "{% endfor %}{% endfor %}{% endfor %}"
        ),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
            "{% endfor %}"
        ),
        (
            "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
            "{% endfor %}"
        ),
        "{{ 'a' * 999999999 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 9 ** 999999999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(100) %}{% for j in range(1000) %}{{ 'y' * 1000 }}{% endfor %}{% endfor %}",
    ],
)
def test_refuses(source: str) -> None:
    begun_s = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert time.monotonic() - begun_s < 8


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% for %}")
