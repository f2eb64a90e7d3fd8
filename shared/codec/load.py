"""The codec of a model source: its tokenizer, and its chat template if it has one."""

from finback.shared.codec import gguf_tokenizer, hf_tokenizer
from finback.shared.codec.chat_template import ChatTemplate
from finback.shared.codec.conversation import ConversationRenderer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError
from finback.shared.models.text_files import TextFiles


def load_tokenizer(text: TextFiles) -> Tokenizer:
    """The tokenizer of a GGUF file or a Hugging Face folder; one that is unknown is refused."""
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
    return hf_tokenizer.build(
        text.hf.read_tokenizer_json(), bos_id=text.bos_id, eos_ids=text.eos_ids
    )


def load_renderer(text: TextFiles, tokenizer: Tokenizer) -> ConversationRenderer | None:
    """What renders conversations; None for a model without a chat template."""
    if text.chat_template is None:
        return None

    def spelling(token_id: int | None) -> str:
        return "" if token_id is None else tokenizer.spelling(token_id)

    template = ChatTemplate(
        text.chat_template,
        bos_token=spelling(text.bos_id),
        eos_token=spelling(text.eos_ids[0] if text.eos_ids else None),
    )
    return ConversationRenderer(template, tokenizer.control)
