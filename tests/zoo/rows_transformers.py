"""Models of the library transformers, by small configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from side_torch import Objects, without_dropout
from torch import nn

from onward.frameworks.torch.exact import ClassesLast
from zoo import Case

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,
}
"""Settings of text models. Configurations translate these names into their own. Weights are large enough for attention
to count."""
_TWICE = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "init_std": 0.2,
    "initializer_range": 0.2,
}
"""Settings of encoder-decoders like BART."""

Inputs = Callable[[Any], Mapping[str, Any]]


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _SMALL.items() if name not in names}


def _model(name: str, config: Any, inputs: Inputs | Mapping[str, Any], *, keep: bool = False, **options: Any) -> Any:
    """Return a model of transformers, without dropout, and a batch."""
    import transformers

    torch.manual_seed(0)
    if isinstance(config, tuple):
        config_name, settings = config
        config = getattr(transformers, config_name)(**settings)
    module = getattr(transformers, name)(config)
    module = module.train() if keep else without_dropout(module)
    return Objects(module, dict(inputs(module.config) if callable(inputs) else inputs), **options)


def _case(family: str, name: str, config: Any, inputs: Any, label: str = "", quick: bool = False, **options: Any):
    def build():
        settings = config() if callable(config) else config
        return _model(name, settings, inputs, **options)

    return Case(family, f"{name}{label}", "torch", build, needs=("transformers",), quick=quick)


# ---- batches ---------------------------------------------------------------------------------------------------------


def _ids(rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length))


def _tokens(labels: bool = True, length: int = 7) -> Inputs:
    """Return tokens, with labels of each."""

    def make(config: Any) -> Mapping[str, Any]:
        ids = _ids(length=length)
        return {"input_ids": ids, **({"labels": _ids(length=length)} if labels else {})}

    return make


def _padded(config: Any) -> Mapping[str, Any]:
    """Return tokens with padding, a mask and a class for each row."""
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 4 + [0] * 3])
    return {"input_ids": _ids() * mask, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}


def _spans(config: Any) -> Mapping[str, Any]:
    return {"input_ids": _ids(), "start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 5, 6])}


def _choices(config: Any) -> Mapping[str, Any]:
    return {"input_ids": torch.randint(3, 64, (3, 2, 7)), "labels": torch.tensor([0, 1, 0])}


def _next_sentence(config: Any) -> Mapping[str, Any]:
    return {"input_ids": _ids(), "labels": _ids(), "next_sentence_label": torch.tensor([0, 1, 0])}


def _tags(config: Any) -> Mapping[str, Any]:
    labels = torch.randint(0, 2, (3, 7))
    labels[:, -2:] = -100
    return {"input_ids": _ids(), "labels": labels}


def _pairs(config: Any) -> Mapping[str, Any]:
    return {"input_ids": _ids(), "labels": _ids(length=5)}


def _image(size: int = 16, labels: bool = True, channels: int = 3, rows: int = 3) -> Inputs:
    def make(config: Any) -> Mapping[str, Any]:
        pixels = {"pixel_values": torch.randn(rows, channels, size, size)}
        return {**pixels, "labels": torch.arange(rows) % 2} if labels else pixels

    return make


def _segments(size: int = 32) -> Inputs:
    def make(config: Any) -> Mapping[str, Any]:
        return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 2, (2, size, size))}

    return make


def _boxes(config: Any) -> Mapping[str, Any]:
    labels = [
        {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4) * 0.4 + 0.1},
        {"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4) * 0.4 + 0.1},
    ]
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": labels}


def _waves(labels: torch.Tensor | None = None, length: int = 400) -> Inputs:
    return lambda config: {"input_values": torch.randn(2, length), **({"labels": labels} if labels is not None else {})}


def _text_and_image(loss: bool = True, length: int = 7, size: int = 16, **more: Any) -> Inputs:
    def make(config: Any) -> Mapping[str, Any]:
        both = {"input_ids": _ids(length=length), "pixel_values": torch.randn(3, 3, size, size)}
        return {**both, **more, **({"return_loss": True} if loss else {})}

    return make


def _layout(image: int = 0, labels: torch.Tensor | None = None) -> Inputs:
    def make(config: Any) -> Mapping[str, Any]:
        corners = torch.randint(0, 10, (3, 7, 4)).sort(-1).values
        pixels = {"pixel_values": torch.randn(3, 3, image, image)} if image else {}
        tags = torch.randint(0, 2, (3, 7)) if labels is None else labels
        return {"input_ids": _ids(), "bbox": corners, **pixels, "labels": tags}

    return make


_CTC = torch.randint(1, 30, (2, 3), generator=torch.Generator().manual_seed(0))
_CLASSES = torch.tensor([0, 1])
_LABELED_TOKENS, _LABELED_IMAGES, _SPOKEN = _tokens(), _image(), _waves(_CTC)


# ---- text ------------------------------------------------------------------------------------------------------------


def _encoder(name: str, inputs: Any, label: str = "", quick: bool = False, config: str = "", **settings: Any) -> Case:
    config = config or f"{name.split('For')[0].removesuffix('Model').removesuffix('LMHead')}Config"
    small = _without(*settings.pop("without", ()))
    return _case("encoders", name, (config, small | settings), inputs, label, quick)


ENCODERS = [
    _encoder("BertForMaskedLM", _tokens(), quick=True),
    _encoder("BertForSequenceClassification", _padded, ", padding"),
    _encoder("BertForPreTraining", _next_sentence),
    _encoder("BertForQuestionAnswering", _spans),
    _encoder("BertForMultipleChoice", _choices),
    _encoder("BertForSequenceClassification", _padded, ", eager attention", attn_implementation="eager"),
    _encoder("DistilBertForTokenClassification", _tags, dim=16, n_layers=1, n_heads=2, hidden_dim=32),
    _encoder("RobertaForMaskedLM", _tokens()),
    _encoder("RobertaForSequenceClassification", _padded, ", padding"),
    _encoder("CamembertForTokenClassification", _tags),
    _encoder("XLMRobertaForQuestionAnswering", _spans),
    _encoder("AlbertForMaskedLM", _tokens(), embedding_size=8),
    _encoder("ElectraForPreTraining", _tags, embedding_size=8),
    _encoder("DebertaForMaskedLM", _tokens(), relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("DebertaForSequenceClassification", _padded, ", padding", relative_attention=True, pos_att_type=["c2p"]),
    _encoder(
        "DebertaV2ForMaskedLM",
        _tokens(),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _encoder(
        "DebertaV2ForSequenceClassification",
        _padded,
        ", padding",
        relative_attention=True,
        pos_att_type=["p2c"],
        conv_kernel_size=3,
    ),
    _encoder(
        "MobileBertForMaskedLM",
        _tokens(),
        embedding_size=8,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        num_feedforward_networks=2,
    ),
    _encoder("LongformerForMaskedLM", _tokens(length=8), attention_window=4),
    _encoder("LongformerForSequenceClassification", _padded, ", padding", attention_window=4),
    _encoder("BigBirdForMaskedLM", _tokens(), attention_type="original_full"),
    _encoder(
        "BigBirdForMaskedLM",
        _tokens(length=48),
        ", sparse",
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=1,
    ),
    _encoder("FNetForMaskedLM", _tokens(), tpu_short_seq_length=7),
    _encoder(
        "XLNetLMHeadModel",
        _tokens(),
        without=["max_position_embeddings"],
        d_model=16,
        n_layer=1,
        n_head=2,
        d_inner=32,
        mem_len=None,
    ),
    _encoder(
        "XLNetForSequenceClassification",
        _padded,
        ", padding",
        without=["max_position_embeddings"],
        d_model=16,
        n_layer=1,
        n_head=2,
        d_inner=32,
    ),
    _encoder(
        "XLMWithLMHeadModel",
        _tokens(),
        config="XLMConfig",
        emb_dim=16,
        n_layers=1,
        n_heads=2,
        n_langs=1,
        pad_index=0,
        eos_index=2,
        mask_index=3,
    ),
    _encoder(
        "FlaubertForSequenceClassification",
        _padded,
        emb_dim=16,
        n_layers=1,
        n_heads=2,
        n_langs=1,
        pad_index=0,
        eos_index=2,
        mask_index=3,
    ),
    _encoder(
        "FunnelForMaskedLM",
        _tokens(length=8),
        without=["num_hidden_layers"],
        d_model=16,
        n_head=2,
        d_head=8,
        d_inner=32,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    _encoder("MPNetForMaskedLM", _tokens()),
    _encoder(
        "NystromformerForMaskedLM", _tokens(length=8), num_landmarks=4, segment_means_seq_len=8, conv_kernel_size=3
    ),
    _encoder("RoFormerForMaskedLM", _tokens(), config="RoFormerConfig", embedding_size=16),
    _encoder("ConvBertForMaskedLM", _tokens(), embedding_size=16, conv_kernel_size=3, head_ratio=1),
    _encoder("SqueezeBertForMaskedLM", _tokens(), embedding_size=16),
    _encoder("MegatronBertForMaskedLM", _tokens()),
    _encoder("ErnieForSequenceClassification", _padded),
    _encoder("IBertForMaskedLM", _tokens(), quant_mode=False),
    _encoder("MraForMaskedLM", _tokens(length=32), block_per_row=1),
    _encoder("YosoForMaskedLM", _tokens(), use_expectation=True),
    _encoder(
        "CanineForSequenceClassification",
        _padded,
        num_hash_functions=2,
        num_hash_buckets=32,
        downsampling_rate=2,
        local_transformer_stride=8,
        upsampling_kernel_size=2,
    ),
    _encoder("LukeForMaskedLM", _tokens(), entity_vocab_size=8, entity_emb_size=8),
    _encoder("RemBertForMaskedLM", _tokens(), input_embedding_size=8, output_embedding_size=8),
    _encoder("ModernBertForMaskedLM", _tokens(), global_attn_every_n_layers=1, local_attention=4),
    _encoder("EsmForMaskedLM", _tokens(), mask_token_id=3, position_embedding_type="rotary"),
    _encoder("XmodForMaskedLM", _tokens(), languages=["en"], default_language="en"),
    _encoder(
        "RoCBertForMaskedLM",
        _tokens(),
        enable_pronunciation=False,
        enable_shape=False,
        pronunciation_vocab_size=8,
        shape_vocab_size=8,
        pronunciation_embed_dim=4,
        shape_embed_dim=4,
    ),
    _encoder("Data2VecTextForMaskedLM", _tokens()),
]
ENCODERS += [
    _case(
        "encoders",
        "BertModel",
        ("BertConfig", _SMALL),
        _tokens(labels=False),
        ", MSE of a pooled output",
        loss={"pooler_output": nn.MSELoss()},
        targets={"pooler_output": torch.rand(3, 16)},
    ),
    _case(
        "encoders",
        "ReformerForMaskedLM",
        (
            "ReformerConfig",
            {
                **_SMALL,
                "attn_layers": ["local", "local"],
                "axial_pos_embds": True,
                "axial_pos_shape": (4, 4),
                "axial_pos_embds_dim": (8, 8),
                "feed_forward_size": 32,
                "attention_head_size": 8,
                "is_decoder": False,
                "num_buckets": 2,
                "hash_seed": 0,
                "lsh_attn_chunk_length": 4,
                "local_attn_chunk_length": 4,
            },
        ),
        _tokens(length=16),
    ),
    _case(
        "encoders",
        "PerceiverForMaskedLM",
        (
            "PerceiverConfig",
            {
                "vocab_size": 64,
                "d_model": 16,
                "num_latents": 4,
                "d_latents": 16,
                "num_blocks": 1,
                "num_self_attends_per_block": 1,
                "num_self_attention_heads": 2,
                "num_cross_attention_heads": 2,
                "max_position_embeddings": 8,
            },
        ),
        lambda config: {"inputs": _ids(length=8), "labels": _ids(length=8)},
    ),
]


def _decoder(
    name: str,
    inputs: Any = _LABELED_TOKENS,
    label: str = "",
    quick: bool = False,
    config: str = "",
    family="decoders",
    **settings: Any,
) -> Case:
    config = config or f"{name.split('For')[0].removesuffix('LMHeadModel').removesuffix('LMHead')}Config"
    return _case(family, name, (config, _SMALL | settings), inputs, label, quick)


_GROUPED = {"num_key_value_heads": 1, "head_dim": 8}
DECODERS = [
    _decoder("GPT2LMHeadModel", n_embd=16, n_layer=1, n_head=2, n_inner=32, n_positions=64),
    _decoder("GPT2ForSequenceClassification", _padded, ", padding", n_embd=16, n_layer=1, n_head=2, n_positions=64),
    _decoder("OpenAIGPTLMHeadModel", n_embd=16, n_layer=1, n_head=2, n_positions=64),
    _decoder(
        "GPTNeoForCausalLM",
        num_hidden_layers=2,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    _decoder("GPTJForCausalLM", n_embd=16, n_layer=1, n_head=2, n_positions=64, rotary_dim=4),
    _decoder("GPTNeoXForCausalLM"),
    _decoder("GPTBigCodeForCausalLM", n_embd=16, n_layer=1, n_head=2, n_positions=64),
    _decoder("CodeGenForCausalLM", n_embd=16, n_layer=1, n_head=4, num_attention_heads=4, n_positions=64, rotary_dim=4),
    _decoder("CTRLLMHeadModel", n_embd=16, n_layer=1, n_head=2, dff=32, n_positions=64),
    _decoder("OPTForCausalLM", ffn_dim=32, word_embed_proj_dim=16),
    _decoder("BloomForCausalLM", n_layer=1, n_head=2),
    _decoder("MptForCausalLM", d_model=16, n_layers=1, n_heads=2, expansion_ratio=2),
    _decoder("LlamaForCausalLM", **_GROUPED),
    _decoder("LlamaForSequenceClassification", _padded, ", padding", **_GROUPED),
    _decoder("MistralForCausalLM", sliding_window=4, **_GROUPED),
    _decoder("Qwen2ForCausalLM", num_key_value_heads=1),
    _decoder("Qwen3ForCausalLM", **_GROUPED),
    _decoder(
        "Qwen3NextForCausalLM",
        num_hidden_layers=2,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        **_GROUPED,
    ),
    _decoder("GemmaForCausalLM", **_GROUPED),
    _decoder("Gemma2ForCausalLM", query_pre_attn_scalar=8, sliding_window=4, **_GROUPED),
    _decoder("Gemma3ForCausalLM", config="Gemma3TextConfig", query_pre_attn_scalar=8, sliding_window=4, **_GROUPED),
    _decoder("PhiForCausalLM", partial_rotary_factor=0.5),
    _decoder("Phi3ForCausalLM", num_key_value_heads=1, sliding_window=4),
    _decoder("FalconForCausalLM", new_decoder_architecture=False, multi_query=True, alibi=False),
    _decoder("FalconForCausalLM", label=", alibi", new_decoder_architecture=True, num_kv_heads=1, alibi=True),
    _decoder("StableLmForCausalLM", num_key_value_heads=1, partial_rotary_factor=0.5),
    _decoder("OlmoForCausalLM"),
    _decoder("Olmo2ForCausalLM"),
    _decoder("CohereForCausalLM", num_key_value_heads=1),
    _decoder("Starcoder2ForCausalLM", num_key_value_heads=1),
    _decoder("GraniteForCausalLM"),
    _decoder("NemotronForCausalLM", **_GROUPED),
    _decoder("PersimmonForCausalLM"),
    _decoder("BioGptForCausalLM"),
    _decoder("XGLMForCausalLM", d_model=16, num_layers=2, attention_heads=2, ffn_dim=32),
    _decoder("GlmForCausalLM", **_GROUPED),
    _decoder("HeliumForCausalLM", **_GROUPED),
    _decoder("SmolLM3ForCausalLM", num_key_value_heads=1),
    _decoder("BertLMHeadModel", config="BertConfig", is_decoder=True),
    _decoder("MambaForCausalLM", state_size=4, time_step_rank=2, use_mambapy=False),
    _decoder("Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4, expand=2),
    _decoder("FalconMambaForCausalLM", state_size=4, time_step_rank=2),
    _decoder("RwkvForCausalLM", attention_hidden_size=16, context_length=64),
    _decoder(
        "RecurrentGemmaForCausalLM",
        num_hidden_layers=2,
        lru_width=16,
        attention_window_size=4,
        num_key_value_heads=1,
        block_types=["recurrent", "attention"],
    ),
    _decoder(
        "JambaForCausalLM",
        num_hidden_layers=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
]

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LATENT = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}


def _mixture(name: str, label: str = "", quick: bool = False, **settings: Any) -> Case:
    return _decoder(name, label=label, quick=quick, family="mixtures of experts", **{**_EXPERTS, **settings})


MIXTURES = [
    _mixture("MixtralForCausalLM", num_key_value_heads=1, output_router_logits=True),
    _mixture("MixtralForCausalLM", ", eager experts", num_key_value_heads=1, experts_implementation="eager"),
    _mixture("Qwen2MoeForCausalLM", num_key_value_heads=1, shared_expert_intermediate_size=8),
    _mixture("Qwen3MoeForCausalLM", **_GROUPED),
    _mixture("OlmoeForCausalLM"),
    _mixture("DeepseekV2ForCausalLM", **_LATENT, topk_method="group_limited_greedy"),
    _mixture("DeepseekV3ForCausalLM", **_LATENT),
    _mixture(
        "GptOssForCausalLM",
        num_hidden_layers=2,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        **_GROUPED,
    ),
    _mixture("GraniteMoeForCausalLM"),
    _mixture("PhimoeForCausalLM", num_key_value_heads=1),
    _mixture("Ernie4_5_MoeForCausalLM", num_key_value_heads=1, moe_num_experts=4, moe_k=2, moe_layer_start_index=0),
    _mixture("Glm4MoeForCausalLM", **{**_LATENT, **_GROUPED}),
]


def _twice(name: str, inputs: Any = _pairs, label: str = "", quick: bool = False, config: str = "", **settings: Any):
    return _case(
        "encoder-decoders",
        name,
        (config or f"{name.split('For')[0].removesuffix('MTModel')}Config", _TWICE | settings),
        inputs,
        label,
        quick,
    )


_T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 4,
    "initializer_factor": 1.0,
    "vocab_size": 64,
    "decoder_start_token_id": 0,
}
ENCODER_DECODERS = [
    _twice("T5ForConditionalGeneration", **_T5),
    _twice("T5ForConditionalGeneration", label=", gated", feed_forward_proj="gated-gelu", **_T5),
    _twice("MT5ForConditionalGeneration", **_T5),
    _twice("UMT5ForConditionalGeneration", **_T5),
    _twice("LongT5ForConditionalGeneration", local_radius=3, global_block_size=4, **_T5),
    _twice(
        "SwitchTransformersForConditionalGeneration",
        **_T5,
        num_experts=2,
        expert_capacity=64,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        router_jitter_noise=0.0,
    ),
    _twice("BartForConditionalGeneration"),
    _twice(
        "BartForSequenceClassification",
        lambda config: {
            "input_ids": torch.cat([torch.randint(3, 64, (3, 6)), torch.full((3, 1), 2)], 1),
            "labels": torch.tensor([0, 1, 0]),
        },
    ),
    _twice("MBartForConditionalGeneration"),
    _twice("MarianMTModel"),
    _twice("PegasusForConditionalGeneration"),
    _twice("PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    _twice("BlenderbotForConditionalGeneration"),
    _twice("BlenderbotSmallForConditionalGeneration"),
    _case(
        "encoder-decoders",
        "ProphetNetForConditionalGeneration",
        (
            "ProphetNetConfig",
            {
                "vocab_size": 64,
                "hidden_size": 16,
                "num_encoder_layers": 1,
                "num_decoder_layers": 1,
                "num_encoder_attention_heads": 2,
                "num_decoder_attention_heads": 2,
                "ngram": 2,
                "encoder_ffn_dim": 32,
                "decoder_ffn_dim": 32,
                "max_position_embeddings": 64,
                "num_buckets": 4,
                "relative_max_distance": 8,
            },
        ),
        _pairs,
    ),
    _twice(
        "LEDForConditionalGeneration",
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _twice("M2M100ForConditionalGeneration"),
    _twice(
        "NllbMoeForConditionalGeneration",
        num_experts=2,
        encoder_sparse_step=1,
        decoder_sparse_step=1,
        expert_capacity=64,
        router_jitter_noise=0.0,
    ),
    _twice("FSMTForConditionalGeneration", _tokens(), langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64),
    _twice("MvpForConditionalGeneration"),
    _twice("PLBartForConditionalGeneration"),
]

# ---- images ----------------------------------------------------------------------------------------------------------

_PATCHES = {
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_channels": 3,
    "initializer_range": 0.2,
}


def _vision(
    name: str,
    inputs: Any = _LABELED_IMAGES,
    label: str = "",
    quick: bool = False,
    config: str = "",
    options: Mapping[str, Any] = {},
    **settings: Any,
):
    return _case("vision", name, (config or f"{name.split('For')[0]}Config", settings), inputs, label, quick, **options)


def _swin(**more: Any) -> dict[str, Any]:
    return {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [1, 2],
        "window_size": 4,
        **more,
    }


def _resnet_backbone() -> Any:
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"], layer_type="basic"
    )


_DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_queries": 4,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_labels": 2,
}


def _detr(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: (name, {**_DETR, "backbone_config": _resnet_backbone(), **settings})


def _mask_former(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        backbone = transformers.SwinConfig(
            **_swin(
                depths=[1, 1, 1, 1],
                num_heads=[1, 1, 2, 2],
                window_size=2,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            )
        )
        return name, {"backbone_config": backbone, "num_labels": 2, **settings}

    return make


_BOXES = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0))


def _masks(config: Any) -> Mapping[str, Any]:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32),
        "mask_labels": [torch.randint(0, 2, (2, 32, 32)).float(), torch.randint(0, 2, (1, 32, 32)).float()],
        "class_labels": [torch.tensor([0, 1]), torch.tensor([1])],
    }


VISION = [
    _vision("ViTForImageClassification", **_PATCHES),
    _vision("DeiTForImageClassification", **_PATCHES),
    _vision("BeitForImageClassification", use_relative_position_bias=True, **_PATCHES),
    _vision("Data2VecVisionForImageClassification", use_shared_relative_position_bias=True, **_PATCHES),
    _vision(
        "ViTMAEForPreTraining",
        _image(labels=False),
        **_PATCHES,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    ),
    _vision("ViTMSNForImageClassification", **_PATCHES),
    _vision("Dinov2ForImageClassification", **_PATCHES),
    _vision("SwinForImageClassification", _image(32), **_swin()),
    _vision("Swinv2ForImageClassification", _image(32), **_swin()),
    _vision("ConvNextForImageClassification", _image(32), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _vision("ConvNextV2ForImageClassification", _image(32), hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _vision(
        "ResNetForImageClassification",
        _image(32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="bottleneck",
    ),
    _vision(
        "RegNetForImageClassification",
        _image(32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
    ),
    _vision(
        "BitForImageClassification",
        _image(32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_groups=4,
        layer_type="preactivation",
    ),
    _vision(
        "EfficientNetForImageClassification", _image(32), width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320
    ),
    _vision("MobileNetV1ForImageClassification", _image(32), depth_multiplier=0.25, min_depth=4),
    _vision("MobileNetV2ForImageClassification", _image(32), depth_multiplier=0.25, min_depth=4),
    _vision(
        "MobileViTForImageClassification",
        _image(32),
        image_size=32,
        hidden_sizes=[8, 12, 16],
        neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 8],
        num_attention_heads=2,
        expand_ratio=1.0,
    ),
    _vision(
        "MobileViTV2ForImageClassification", _image(64), image_size=64, width_multiplier=0.25, n_attn_blocks=[1, 1, 1]
    ),
    _vision(
        "SegformerForImageClassification",
        _image(32),
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    _vision(
        "SegformerForSemanticSegmentation",
        _segments(),
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
    ),
    _vision(
        "PvtForImageClassification",
        _image(32),
        image_size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    _vision(
        "PoolFormerForImageClassification",
        _image(32),
        config="PoolFormerConfig",
        depths=[1, 1],
        hidden_sizes=[8, 16],
        num_encoder_blocks=2,
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    _vision(
        "LevitForImageClassification",
        _image(32),
        image_size=32,
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        depths=[1, 1],
        key_dim=[4, 4],
        mlp_ratio=[2, 2],
        attention_ratio=[2, 2],
        down_ops=[["Subsample", 4, 2, 2, 2, 2], [""]],
    ),
    _vision(
        "CvtForImageClassification",
        _image(32),
        patch_sizes=[7, 3],
        patch_stride=[4, 2],
        patch_padding=[2, 1],
        embed_dim=[8, 16],
        num_heads=[1, 2],
        depth=[1, 2],
        mlp_ratio=[2.0, 2.0],
        attention_drop_rate=[0.0, 0.0],
        drop_rate=[0.0, 0.0],
        drop_path_rate=[0.0, 0.0],
        qkv_bias=[True, True],
        cls_token=[False, True],
        qkv_projection_method=["dw_bn", "dw_bn"],
        kernel_qkv=[3, 3],
        padding_kv=[1, 1],
        stride_kv=[2, 2],
        padding_q=[1, 1],
        stride_q=[1, 1],
    ),
    _vision(
        "FocalNetForImageClassification",
        _image(32),
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    _vision(
        "SwiftFormerForImageClassification",
        _image(64),
        config="SwiftFormerConfig",
        image_size=64,
        depths=[1, 1],
        embed_dims=[8, 16],
    ),
    _vision(
        "HieraForImageClassification",
        _image(32),
        image_size=[32, 32],
        patch_size=[7, 7],
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=1,
    ),
    _vision(
        "ImageGPTForImageClassification",
        lambda config: {"input_ids": torch.randint(0, 16, (3, 9)), "labels": torch.tensor([0, 1, 0])},
        vocab_size=17,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
    ),
    _vision(
        "DPTForSemanticSegmentation",
        _segments(),
        **{**_PATCHES, "image_size": 32, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        is_hybrid=False,
        auxiliary_loss_weight=0.0,
        num_labels=2,
    ),
    _vision(
        "GLPNForDepthEstimation",
        lambda config: {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.rand(2, 32, 32) + 0.5},
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
    ),
    _vision(
        "BeitForMaskedImageModeling",
        lambda config: {
            "pixel_values": torch.randn(3, 3, 16, 16),
            "bool_masked_pos": torch.tensor([[1, 0, 0, 1]] * 3).bool(),
            "labels": torch.randint(0, 64, (6,)),
        },
        vocab_size=64,
        use_mask_token=True,
        **_PATCHES,
    ),
    _vision(
        "ViTForMaskedImageModeling",
        lambda config: {
            "pixel_values": torch.randn(3, 3, 16, 16),
            "bool_masked_pos": torch.tensor([[1, 0, 0, 1]] * 3).bool(),
        },
        encoder_stride=8,
        **_PATCHES,
    ),
    _vision(
        "YolosForObjectDetection",
        lambda config: {**_boxes(config), "pixel_values": torch.randn(2, 3, 16, 16)},
        **{**_PATCHES, "image_size": [16, 16]},
        num_detection_tokens=4,
        num_labels=2,
    ),
    _vision(
        "VideoMAEForVideoClassification",
        lambda config: {"pixel_values": torch.randn(2, 2, 3, 16, 16), "labels": torch.tensor([0, 1])},
        num_frames=2,
        tubelet_size=2,
        **_PATCHES,
    ),
    _vision(
        "TimesformerForVideoClassification",
        lambda config: {"pixel_values": torch.randn(2, 2, 3, 16, 16), "labels": torch.tensor([0, 1])},
        num_frames=2,
        **_PATCHES,
    ),
    _vision(
        "Swin2SRForImageSuperResolution",
        _image(16, labels=False),
        image_size=16,
        embed_dim=8,
        depths=[1],
        num_heads=[2],
        window_size=4,
        mlp_ratio=2.0,
        upscale=2,
        options={"loss": {"reconstruction": nn.L1Loss()}, "targets": {"reconstruction": torch.rand(3, 3, 32, 32)}},
    ),
    *(
        _case(
            "vision",
            f"{name}ForObjectDetection",
            _detr(f"{name}Config", **more),
            _image(32, labels=False, rows=2),
            ", losses of outputs",
            loss={"logits": ClassesLast(nn.CrossEntropyLoss()), "pred_boxes": nn.L1Loss()},
            targets={"logits": torch.arange(8).reshape(2, 4) % 2, "pred_boxes": _BOXES},
        )
        for name, more in (
            ("Detr", {}),
            ("ConditionalDetr", {}),
            ("DeformableDetr", {"num_feature_levels": 1, "d_model": 32}),
        )
    ),
    _case("vision", "DetrForObjectDetection", _detr("DetrConfig"), _boxes),
    _case("vision", "ConditionalDetrForObjectDetection", _detr("ConditionalDetrConfig"), _boxes),
    _case(
        "vision",
        "DeformableDetrForObjectDetection",
        _detr("DeformableDetrConfig", num_feature_levels=1, d_model=32),
        _boxes,
    ),
    _case(
        "vision",
        "Mask2FormerForUniversalSegmentation",
        _mask_former(
            "Mask2FormerConfig",
            hidden_dim=32,
            feature_size=32,
            mask_feature_size=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_feedforward_dim=16,
            dim_feedforward=16,
            num_attention_heads=2,
            num_queries=4,
            train_num_points=16,
        ),
        _masks,
    ),
    _case(
        "vision",
        "MaskFormerForInstanceSegmentation",
        lambda: (
            "MaskFormerConfig",
            {
                "backbone_config": _mask_former("")()[1]["backbone_config"],
                "fpn_feature_size": 32,
                "mask_feature_size": 32,
                "num_labels": 2,
                "decoder_config": {"model_type": "detr", **_DETR, "backbone_config": None},
            },
        ),
        _masks,
    ),
]

# ---- sound -----------------------------------------------------------------------------------------------------------

_SPEECH = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": [8, 8],
    "conv_stride": [4, 4],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "pad_token_id": 0,
    "classifier_proj_size": 8,
    "initializer_range": 0.2,
}


def _sound(
    name: str,
    inputs: Any = _SPOKEN,
    label: str = "",
    config: str = "",
    options: Mapping[str, Any] = {},
    **settings: Any,
):
    return _case(
        "audio",
        name,
        (config or f"{name.split('For')[0].removesuffix('Model')}Config", settings),
        inputs,
        label,
        **options,
    )


def _features(length: int, bins: int, name: str = "input_features", last: bool = False, **more: Any) -> Inputs:
    shape = (2, length, bins) if last else (2, bins, length)
    return lambda config: {name: torch.randn(shape), **more}


AUDIO = [
    _sound("Wav2Vec2ForCTC", **_SPEECH),
    _sound(
        "Wav2Vec2ForCTC",
        label=", layer norms",
        **_SPEECH,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        ctc_loss_reduction="mean",
    ),
    _sound("Wav2Vec2ForSequenceClassification", _waves(_CLASSES), **_SPEECH),
    _sound(
        "Wav2Vec2Model",
        _waves(),
        **_SPEECH,
        options={"loss": {"last_hidden_state": nn.MSELoss()}, "targets": {"last_hidden_state": torch.rand(2, 24, 16)}},
    ),
    _sound("HubertForCTC", **_SPEECH),
    _sound("HubertForSequenceClassification", _waves(_CLASSES), **_SPEECH),
    _sound("WavLMForCTC", **_SPEECH, num_buckets=8, max_bucket_distance=16),
    _sound("UniSpeechForCTC", **_SPEECH),
    _sound("UniSpeechSatForSequenceClassification", _waves(_CLASSES), **_SPEECH),
    _sound("Data2VecAudioForCTC", **{**_SPEECH, "num_conv_pos_embeddings": 2}, conv_pos_kernel_size=3),
    _sound("SEWForCTC", **_SPEECH, squeeze_factor=2),
    _sound(
        "SEWDForCTC",
        **_SPEECH,
        squeeze_factor=2,
        position_buckets=4,
        pos_att_type=["c2p", "p2c"],
        max_position_embeddings=64,
    ),
    _sound("Wav2Vec2ConformerForCTC", **_SPEECH, conv_depthwise_kernel_size=3, position_embeddings_type="relative"),
    _sound(
        "Wav2Vec2BertForCTC",
        lambda config: {"input_features": torch.randn(2, 12, 8), "labels": _CTC},
        **_SPEECH,
        feature_projection_input_dim=8,
        conv_depthwise_kernel_size=3,
        left_max_position_embeddings=4,
        right_max_position_embeddings=4,
    ),
    _sound(
        "WhisperForConditionalGeneration",
        _features(16, 8, labels=torch.randint(3, 64, (2, 5))),
        **{**_TWICE, "max_source_positions": 8},
        max_target_positions=16,
        num_mel_bins=8,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    _sound(
        "WhisperForAudioClassification",
        _features(16, 8, labels=_CLASSES),
        **{**_TWICE, "max_source_positions": 8},
        classifier_proj_size=8,
        max_target_positions=16,
        num_mel_bins=8,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    ),
    _sound(
        "Speech2TextForConditionalGeneration",
        _features(16, 8, last=True, labels=torch.randint(3, 64, (2, 5))),
        config="Speech2TextConfig",
        **_TWICE,
        input_feat_per_channel=8,
        conv_channels=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    _sound(
        "ASTForAudioClassification",
        _features(24, 16, "input_values", last=True, labels=_CLASSES),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=24,
        num_mel_bins=16,
    ),
    _sound(
        "SpeechT5ForSpeechToText",
        lambda config: {"input_values": torch.randn(2, 400), "labels": torch.randint(3, 64, (2, 5))},
        config="SpeechT5Config",
        **{
            **_SPEECH,
            **_TWICE,
            "hidden_size": 16,
            "vocab_size": 64,
            "encoder_layerdrop": 0.0,
            "max_speech_positions": 64,
            "max_text_positions": 64,
        },
    ),
]

# ---- several kinds of data -------------------------------------------------------------------------------------------

_TEXT_PART = {
    **_SMALL,
    "projection_dim": 8,
    "num_hidden_layers": 1,
    "bos_token_id": 62,
    "eos_token_id": 63,
    "pad_token_id": 1,
}
_VISION_PART = {**_PATCHES, "num_hidden_layers": 1, "projection_dim": 8}


def _both(name: str, inputs: Any, config: str, label: str = "", quick: bool = False, **settings: Any) -> Case:
    return _case("multimodal", name, (config, settings), inputs, label, quick)


_TWO = {"text_config": _TEXT_PART, "vision_config": _VISION_PART, "projection_dim": 8}


def _flat_both(config: Any) -> Mapping[str, Any]:
    return {"input_ids": _ids(), "pixel_values": torch.randn(3, 3, 16, 16)}


_LANGUAGE = {**_SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}


def _with_images(token: int, count: int, **more: Any) -> Inputs:
    """Return text with the tokens of an image in it."""

    def make(config: Any) -> Mapping[str, Any]:
        ids = torch.cat([torch.randint(3, 40, (2, 2)), torch.full((2, count), token), torch.randint(3, 40, (2, 4))], 1)
        return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "labels": ids, **more}

    return make


MULTIMODAL = [
    _both("CLIPModel", _text_and_image(), "CLIPConfig", **_TWO),
    _both("CLIPForImageClassification", _image(), "CLIPConfig", **_TWO),
    _both("SiglipModel", _text_and_image(), "SiglipConfig", **_TWO),
    _both(
        "AltCLIPModel", _text_and_image(), "AltCLIPConfig", **{**_TWO, "text_config": {**_TEXT_PART, "project_dim": 16}}
    ),
    _both("ChineseCLIPModel", _text_and_image(), "ChineseCLIPConfig", **_TWO),
    _both(
        "XCLIPModel",
        lambda config: {"input_ids": _ids(rows=2), "pixel_values": torch.randn(2, 2, 3, 16, 16), "return_loss": True},
        "XCLIPConfig",
        **{
            **_TWO,
            "vision_config": {
                **_VISION_PART,
                "num_frames": 2,
                "mit_hidden_size": 8,
                "mit_num_hidden_layers": 1,
                "mit_num_attention_heads": 2,
                "mit_intermediate_size": 16,
            },
        },
        prompt_num_attention_heads=2,
        prompt_layers=1,
    ),
    _both(
        "CLIPSegForImageSegmentation",
        lambda config: {**_flat_both(config), "labels": torch.randint(0, 2, (3, 16, 16)).float()},
        "CLIPSegConfig",
        **{**_TWO, "vision_config": {**_VISION_PART, "num_hidden_layers": 2}},
        extract_layers=[0, 1],
        reduce_dim=8,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
        conditional_layer=0,
    ),
    _both(
        "GroupViTModel",
        _text_and_image(),
        "GroupViTConfig",
        text_config=_TEXT_PART,
        projection_dim=8,
        projection_intermediate_dim=16,
        vision_config={
            "image_size": 16,
            "patch_size": 4,
            "hidden_size": 16,
            "depths": [1, 1],
            "num_group_tokens": [4, 0],
            "num_output_groups": [4, 4],
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
    ),
    _both(
        "BlipForConditionalGeneration",
        lambda config: {**_flat_both(config), "labels": _ids()},
        "BlipConfig",
        **{**_TWO, "text_config": {**_TEXT_PART, "encoder_hidden_size": 16}},
    ),
    _both("BlipModel", _text_and_image(), "BlipConfig", **_TWO),
    _both(
        "GitForCausalLM",
        lambda config: {**_flat_both(config), "labels": _ids()},
        "GitConfig",
        **{**_SMALL, "vision_config": _VISION_PART},
    ),
    _both(
        "ViltForQuestionAnswering",
        lambda config: {**_flat_both(config), "labels": torch.rand(3, 2)},
        "ViltConfig",
        **{**_SMALL, **_PATCHES},
        max_image_length=-1,
    ),
    _both("LayoutLMForTokenClassification", _layout(), "LayoutLMConfig", **_SMALL, max_2d_position_embeddings=16),
    _both(
        "LayoutLMv3ForTokenClassification",
        _layout(16),
        "LayoutLMv3Config",
        **_SMALL,
        max_2d_position_embeddings=16,
        coordinate_size=2,
        shape_size=4,
        input_size=16,
        patch_size=8,
        visual_embed=True,
    ),
    _both(
        "LiltForTokenClassification",
        _layout(),
        "LiltConfig",
        **{**_SMALL, "hidden_size": 24, "num_attention_heads": 2},
        max_2d_position_embeddings=16,
        channel_shrink_ratio=2,
    ),
    _both(
        "BrosForTokenClassification",
        lambda config: {**_layout()(config), "bbox": torch.rand(3, 7, 4)},
        "BrosConfig",
        **{**_SMALL, "hidden_size": 64},
    ),
    _both(
        "VisualBertForQuestionAnswering",
        lambda config: {
            "input_ids": _ids(),
            "attention_mask": torch.ones(3, 10, dtype=torch.long)[:, :7],
            "visual_embeds": torch.randn(3, 3, 8),
            "labels": torch.rand(3, 2),
        },
        "VisualBertConfig",
        **_SMALL,
        visual_embedding_dim=8,
    ),
    _both(
        "LxmertForQuestionAnswering",
        lambda config: {
            "input_ids": _ids(),
            "visual_feats": torch.randn(3, 3, 8),
            "visual_pos": torch.rand(3, 3, 4),
            "labels": torch.tensor([0, 1, 2]),
        },
        "LxmertConfig",
        **_SMALL,
        visual_feat_dim=8,
        num_qa_labels=4,
        l_layers=1,
        x_layers=1,
        r_layers=1,
    ),
    _both(
        "VisionEncoderDecoderModel",
        lambda config: {"pixel_values": torch.randn(3, 3, 16, 16), "labels": _ids()},
        "VisionEncoderDecoderConfig",
        encoder={"model_type": "vit", **_PATCHES},
        decoder={
            "model_type": "gpt2",
            **_SMALL,
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "add_cross_attention": True,
            "is_decoder": True,
        },
        decoder_start_token_id=1,
        pad_token_id=0,
    ),
    _both(
        "LlavaForConditionalGeneration",
        _with_images(50, 4),
        "LlavaConfig",
        text_config={"model_type": "llama", **_LANGUAGE},
        vision_config={"model_type": "clip_vision_model", **_VISION_PART},
        image_token_id=50,
        vision_feature_layer=-1,
    ),
    _both(
        "PaliGemmaForConditionalGeneration",
        _with_images(50, 4, token_type_ids=torch.tensor([[0] * 6 + [1] * 4] * 2)),
        "PaliGemmaConfig",
        text_config={"model_type": "gemma", **_LANGUAGE},
        vision_config={"model_type": "siglip_vision_model", **_VISION_PART},
        image_token_id=50,
        projection_dim=16,
        hidden_size=16,
    ),
]

# ---- series of numbers -----------------------------------------------------------------------------------------------


def _series(config: Any) -> Mapping[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.rand(2, past) + 1,
        "past_time_features": torch.rand(2, past, 1),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.rand(2, config.prediction_length) + 1,
        "future_time_features": torch.rand(2, config.prediction_length, 1),
    }


_FORECAST = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "init_std": 0.2,
}
_PATCHED = {
    "num_input_channels": 2,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": 4,
    "d_model": 8,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 16,
    "num_targets": 2,
    "init_std": 0.2,
}


def _times(
    name: str, inputs: Any, label: str = "", config: str = "", options: Mapping[str, Any] = {}, **settings: Any
) -> Case:
    return _case("time series", name, (config or f"{name.split('For')[0]}Config", settings), inputs, label, **options)


_VALUES = {"past_values": torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(0))}
SERIES = [
    _times("TimeSeriesTransformerForPrediction", _series, **_FORECAST),
    _times(
        "TimeSeriesTransformerForPrediction",
        _series,
        ", normal",
        distribution_output="normal",
        loss="nll",
        scaling="std",
        **_FORECAST,
    ),
    _times("InformerForPrediction", _series, **_FORECAST, attention_type="full"),
    _times("InformerForPrediction", _series, ", sparse", **_FORECAST, sampling_factor=1),
    _times("AutoformerForPrediction", _series, **_FORECAST, moving_average=3, label_length=2),
    _times("PatchTSTForPrediction", {**_VALUES, "future_values": torch.rand(2, 4, 2)}, **_PATCHED, loss="mse"),
    _times("PatchTSTForClassification", {**_VALUES, "target_values": _CLASSES}, **_PATCHED, use_cls_token=True),
    _times("PatchTSTForRegression", {**_VALUES, "target_values": torch.rand(2, 2)}, **_PATCHED, loss="mse"),
    _times("PatchTSMixerForPrediction", {**_VALUES, "future_values": torch.rand(2, 4, 2)}, **_PATCHED),
    _times("PatchTSMixerForRegression", {**_VALUES, "target_values": torch.rand(2, 2)}, **_PATCHED),
    _times("PatchTSMixerForTimeSeriesClassification", {**_VALUES, "target_values": _CLASSES}, **_PATCHED),
    _times(
        "PatchTSMixerForPrediction",
        {**_VALUES, "future_values": torch.rand(2, 4, 2)},
        ", attention",
        **_PATCHED,
        self_attn=True,
        mode="mix_channel",
        scaling="std",
    ),
]

CASES = [*ENCODERS, *DECODERS, *MIXTURES, *ENCODER_DECODERS, *VISION, *AUDIO, *MULTIMODAL, *SERIES]
