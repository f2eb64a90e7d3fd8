"""The codec of a model source: its tokenizer, how it is prompted, and how its answers are read."""

from dataclasses import dataclass

from finback.shared.codec import gguf_tokenizer, hf_tokenizer
from finback.shared.codec.chat_template import ChatTemplate
from finback.shared.codec.conversation import ConversationRenderer
from finback.shared.codec.formats.base import Starts
from finback.shared.codec.formats.select import (
    DEEPSEEK_V4,
    DEEPSEEK_V41,
    THINK_CLOSE,
    THINK_OPEN,
    Clues,
    format_name,
    select_format,
)
from finback.shared.codec.no_tokenizer import NoTokenizer
from finback.shared.codec.output import OutputFormat, PlainFormat
from finback.shared.codec.prompts import deepseek_prompt
from finback.shared.codec.prompts.deepseek_prompt import DeepseekPrompt
from finback.shared.codec.prompts.jinja_prompt import DEFAULT, JinjaPrompt
from finback.shared.codec.prompts.probe import probe_starts
from finback.shared.codec.prompts.prompt_format import PromptFormat
from finback.shared.codec.prompts.system_tools import SystemToolsPrompt
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError
from finback.shared.models.text_files import TextFiles


def load_tokenizer(text: TextFiles) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face folder; one that is unknown is refused.

    A folder without any has a `NoTokenizer`.
    """
    if text.gguf is not None:
        if text.gguf.model != "gpt2":
            raise ConfigError(
                f"tokenizer model {text.gguf.model!r} is not supported; only byte-level BPE (gpt2)"
            )
        return gguf_tokenizer.build(
            read_tokens=text.gguf.read_tokens,
            read_merges=text.gguf.read_merges,
            read_token_types=lambda: text.gguf.read_token_types().tolist() if text.gguf else [],
            pre=text.gguf.pre,
            bos_id=text.bos_id,
            eos_ids=text.eos_ids,
            adds_bos=text.gguf.add_bos,
        )
    if text.hf is None:
        raise ConfigError("the model source holds no tokenizer")
    if not text.has_tokenizer:
        return NoTokenizer(vocab_size=text.vocab_size, bos_id=text.bos_id, eos_ids=text.eos_ids)
    return hf_tokenizer.build(
        text.hf.read_tokenizer_json(), bos_id=text.bos_id, eos_ids=text.eos_ids
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """Everything of a model that knows text. `prompt` None: it cannot be talked to, only completed."""

    tokenizer: Tokenizer
    prompt: PromptFormat | None
    output: OutputFormat


def load_codec(text: TextFiles, *, architecture: str = "", output_format: str = "auto") -> Codec:
    """The codec of an opened model. Raises `ConfigError`."""
    tokenizer = load_tokenizer(text)
    if not tokenizer.has_text:
        return Codec(tokenizer=tokenizer, prompt=None, output=PlainFormat())
    renderers = load_renderers(text, tokenizer)
    control = tokenizer.control.by_spelling
    clues = Clues(
        templates=dict(text.chat_templates) if renderers else {},
        spellings=frozenset(control),
        special=frozenset(spelling for spelling, token in control.items() if token.is_special),
        architecture=architecture,
    )
    name = format_name(clues, output_format)
    if name in (DEEPSEEK_V4, DEEPSEEK_V41):
        prompt: PromptFormat | None = DeepseekPrompt(name, control)
        starts = deepseek_prompt.STARTS
    else:
        prompt = _prompt(clues, renderers)
        starts = Starts()
        if prompt is not None and clues.can_think:
            starts = probe_starts(prompt, THINK_OPEN, THINK_CLOSE)
    return Codec(
        tokenizer=tokenizer,
        prompt=prompt,
        output=select_format(clues, starts, name),
    )


def _prompt(clues: Clues, renderers: dict[str, ConversationRenderer]) -> PromptFormat | None:
    if not renderers:
        return None
    made = JinjaPrompt(renderers=renderers)
    return made if clues.knows_tools else SystemToolsPrompt(made)


def load_renderer(text: TextFiles, tokenizer: Tokenizer) -> ConversationRenderer | None:
    """What renders conversations by the default template; None for a model without one."""
    return load_renderers(text, tokenizer).get(DEFAULT)


def load_renderers(text: TextFiles, tokenizer: Tokenizer) -> dict[str, ConversationRenderer]:
    """The model's templates by name; empty for a model without a default one."""

    def spelling(token_id: int | None) -> str:
        return "" if token_id is None else tokenizer.spelling(token_id)

    def renderer(source: str) -> ConversationRenderer:
        template = ChatTemplate(
            source,
            bos_token=spelling(text.bos_id),
            eos_token=spelling(text.eos_ids[0] if text.eos_ids else None),
        )
        return ConversationRenderer(template, tokenizer.control)

    if text.chat_template is None or not tokenizer.has_text:
        return {}
    return {name: renderer(source) for name, source in text.chat_templates.items()}
