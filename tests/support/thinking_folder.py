"""A model folder whose template knows reasoning and tools, with SmolLM2's vocabulary; no weights.

A gateway over the echo engine, which says what the last message says, then is a model that can be
told what to think and what to call.
"""

import json
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from finback.shared.codec.load import load_tokenizer
from finback.shared.models.source import open_source

TEMPLATE: Final = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Functions that may be called:' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}
{{- '\nWrite <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content and not loop.last %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string
     else call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{%- endif %}
"""
NAME: Final = "thinker"


def thinking_folder(parent: Path) -> Path:
    """Write the folder; its name is the model's."""
    folder = parent / NAME
    folder.mkdir()
    embedded = open_source()
    tokenizer = load_tokenizer(embedded.text)
    config = {
        "model_type": "llama",
        "vocab_size": embedded.config.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": embedded.config.max_model_len,
        "bos_token_id": embedded.text.bos_id,
        "eos_token_id": list(embedded.text.eos_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    save_file({"none": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder
