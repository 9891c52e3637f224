"""Image models of timm at small sizes, with random weights."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from side_torch import Objects, without_dropout
from torch import nn

from zoo import Case

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
# Where its compiled operators are missing, this module of torchvision fails; timm does not need it.

Options = Mapping[str, Any]

BATCH = 4
CLASSES = 4

_FOUR = {"depths": (1, 1, 1, 1)}
_VIT: Options = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
_DIMS: Options = {**_FOUR, "dims": (8, 16, 24, 32)}
_MIXER: Options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_blocks": 2}
_EMBED: Options = {**_FOUR, "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)}
_REGNET: Options = {"depth": 5, "w0": 16, "wa": 8.0, "wm": 1.5, "group_size": 8, "stem_width": 8}
_RESNET: Options = {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32), "stem_width": 8}

MODELS: Mapping[str, Mapping[str, tuple[int, Options]]] = {
    "residual": {
        "resnet18": (32, {"channels": (8, 16, 24, 32)}),
        "resnet26d": (32, _RESNET),
        "resnext50_32x4d": (32, {**_RESNET, "cardinality": 4, "base_width": 16}),
        "seresnet50": (32, _RESNET),
        "ecaresnet50t": (32, _RESNET),
        "skresnet18": (32, {"layers": (1, 1, 1, 1)}),
        "resnest14d": (32, {"channels": (8, 16, 24, 32), "stem_width": 8}),
        "res2net50_26w_4s": (32, {"layers": (1, 1, 1, 1)}),
        "resnetv2_50": (32, {"layers": (1, 1, 1, 1), "channels": (16, 32, 48, 64)}),
        "densenet121": (32, {"block_config": (2, 2, 2, 2), "growth_rate": 8}),
        "dla34": (32, {"levels": (1, 1, 1, 1, 1, 1), "channels": (8, 8, 16, 24, 32, 40)}),
        "darknet17": (32, {}),
        "tresnet_m": (32, {"layers": (1, 1, 1, 1), "width_factor": 0.25}),
        "regnetx_002": (32, _REGNET),
        "regnety_002": (32, _REGNET),
        "repvgg_a0": (32, {"width_factor": 0.1}),
    },
    "mobile": {
        "efficientnet_b0": (32, {}),
        "mobilenetv2_050": (32, {}),
        "mobilenetv3_small_050": (32, {}),
        "mobilenetv4_conv_small": (32, {}),
        "mnasnet_small": (32, {}),
        "fbnetc_100": (32, {}),
        "lcnet_050": (32, {}),
        "mixnet_s": (32, {}),
        "tinynet_e": (32, {}),
        "ghostnet_050": (32, {}),
        "mobilevit_xxs": (32, {}),
        "mobilevitv2_050": (32, {}),
        "edgenext_xx_small": (32, {**_DIMS, "heads": (2, 2, 2, 2)}),
        "starnet_s050": (32, {}),
    },
    "transformers": {
        "vit_tiny_patch16_224": (32, _VIT),
        "deit_tiny_distilled_patch16_224": (32, _VIT),
        "beit_base_patch16_224": (32, _VIT),
        "eva02_tiny_patch14_224": (32, _VIT),
        "cait_xxs24_224": (32, {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}),
        "xcit_nano_12_p16_224": (32, {"embed_dim": 32, "depth": 2, "num_heads": 4}),
        "swin_tiny_patch4_window7_224": (
            32, {"embed_dim": 12, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4, "patch_size": 4}),
        "swinv2_tiny_window8_256": (
            32, {"embed_dim": 12, "depths": (2, 1), "num_heads": (2, 2), "window_size": 4, "patch_size": 4}),
        "pvt_v2_b0": (32, _EMBED),
        "twins_svt_small": (32, {**_EMBED, "wss": (2, 2, 1, 1)}),
        "twins_pcpvt_small": (32, _EMBED),
        "levit_128s": (32, {"embed_dim": (16, 24, 32), "depth": (1, 1, 1), "num_heads": (2, 2, 2), "key_dim": 8}),
        "convit_tiny": (32, {**_VIT, "embed_dim": 24}),
        "tnt_s_patch16_224": (32, {"embed_dim": 24, "depth": 2, "num_heads_outer": 3, "inner_dim": 8,
                                   "num_heads_inner": 2}),
        "visformer_tiny": (32, {"embed_dim": 48, "depth": (1, 1, 1)}),
        "davit_tiny": (32, {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4),
                            "window_size": 2}),
    },
    "convolutions and mixers": {
        "convnext_atto": (32, _DIMS),
        "convnextv2_atto": (32, _DIMS),
        "inception_next_tiny": (32, _DIMS),
        "mambaout_femto": (32, _DIMS),
    },
}  # fmt: skip

CONFIGURED: Mapping[str, Mapping[str, tuple[int, str, Options]]] = {
    "convolutions and mixers": {
        "mlp_mixer": (32, "mlp_mixer.MlpMixer", _MIXER),
        "resmlp": (32, "mlp_mixer.MlpMixer", {
            **_MIXER, "mlp_ratio": 4, "block_layer": "ResBlock", "norm_layer": "Affine"}),
        "gmlp": (32, "mlp_mixer.MlpMixer", {
            **_MIXER, "mlp_ratio": 4, "block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp"}),
        "convmixer": (32, "convmixer.ConvMixer", {"dim": 16, "depth": 2, "kernel_size": 5, "patch_size": 4}),
    },
    "residual": {
        "vgg": (32, "vgg.VGG", {"cfg": [8, "M", 12, "M", 16, "M", 24, "M", 24, "M"], "mlp_ratio": 0.01}),
        "dpn": (32, "dpn.DPN", {"k_sec": (1, 1, 1, 1), "inc_sec": (4, 4, 4, 4), "k_r": 8, "groups": 4, "small": True,
                                "num_init_features": 8}),
        "inception_v3": (75, "inception_v3.InceptionV3", {}),
        "nfnet": (32, "nfnet.NormFreeNet", {"cfg": {"depths": (1, 1, 1, 1), "channels": (16, 24, 32, 40),
                                                    "stem_chs": 8, "num_features": 48}}),
    },
    "mobile": {
        "rexnet": (32, "rexnet.RexNet", {"width_mult": 0.4, "depth_mult": 0.5, "ch_div": 8}),
        "repvit": (32, "repvit.RepVit", {"embed_dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1)}),
        "efficientvit": (32, "efficientvit_mit.EfficientVit", {
            "widths": (8, 8, 16, 16, 32), "depths": (1, 1, 1, 1, 1), "head_dim": 8, "head_widths": (32, 40)}),
    },
    "transformers": {
        "volo": (32, "volo.VOLO", {
            "layers": (1, 1, 1, 1), "img_size": 32, "patch_size": 8, "stem_hidden_dim": 8, "num_heads": (2, 2, 2, 2),
            "embed_dims": (12, 24, 24, 24), "use_aux_head": False}),
        "nest": (32, "nest.Nest", {"img_size": 32, "embed_dims": (12, 24, 48), "num_heads": (2, 2, 2),
                                   "depths": (1, 1, 1), "patch_size": 4}),
        "focalnet": (32, "focalnet.FocalNet", {**_FOUR, "embed_dim": 8}),
        "gcvit": (64, "gcvit.GlobalContextVit", {**_FOUR, "img_size": 64, "embed_dim": 8, "num_heads": (1, 2, 2, 4),
                                                 "window_size": (4, 4, 4, 2)}),
        "poolformer": (32, "metaformer.MetaFormer", _DIMS),
        "efficientformer": (224, "efficientformer.EfficientFormer", {
            **_FOUR, "embed_dims": (8, 16, 24, 32), "num_vit": 1}),
        "coat": (32, "coat.CoaT", {
            "img_size": 32, "patch_size": 4, "embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1),
            "parallel_depth": 1, "num_heads": 8}),
        "pit": (32, "pit.PoolingVisionTransformer", {
            "img_size": 32, "patch_size": 8, "stride": 4, "base_dims": (8, 8, 8), "depth": (1, 1, 1),
            "heads": (1, 2, 4)}),
        "crossvit": (32, "crossvit.CrossVit", {
            "img_size": 32, "patch_size": (4, 8), "embed_dim": (12, 24), "depth": ((1, 1, 1),), "num_heads": (2, 2),
            "mlp_ratio": (2.0, 2.0, 1.0)}),
        "hiera": (32, "hiera.Hiera", {"img_size": (32, 32), "embed_dim": 8, "stages": (1, 1, 1, 1), "q_pool": 2,
                                      "mask_unit_size": (4, 4)}),
        "tiny_vit": (64, "tiny_vit.TinyVit", {**_FOUR, "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4),
                                              "window_sizes": (2, 2, 2, 2)}),
        "sequencer": (32, "sequencer.Sequencer2d", {
            "img_size": 32, "layers": (1, 1, 1, 1), "patch_sizes": (4, 2, 1, 1), "embed_dims": (12, 16, 16, 16),
            "hidden_sizes": (4, 6, 6, 6)}),
        "maxvit": (64, "maxxvit.MaxxVit", {"img_size": 64, "cfg": {
            "embed_dim": (32, 32), "depths": (1, 1), "block_type": ("M", "M"), "stem_width": 8}}),
        "coatnet": (64, "maxxvit.MaxxVit", {"img_size": 64, "cfg": {
            "embed_dim": (16, 32), "depths": (1, 1), "block_type": ("C", "T"), "stem_width": 8}}),
        "mvitv2": (32, "mvitv2.MultiScaleVit", {"img_size": 32, "cfg": {
            **_FOUR, "embed_dim": 8, "num_heads": 1}}),
    },
}  # fmt: skip
"""Models whose functions in timm fix their sizes: class and arguments."""


def _configured(path: str, options: Options) -> nn.Module:
    """Return a model by its class. Settings that are names are classes of its module."""
    file, _, name = path.partition(".")
    module = importlib.import_module(f"timm.models.{file}")
    values = {
        key: getattr(module, value) if isinstance(value, str) and hasattr(module, value) else value
        for key, value in options.items()
    }
    if isinstance(values.get("cfg"), Mapping):
        values["cfg"] = getattr(module, _SETTINGS[name])(**values["cfg"])
    return getattr(module, name)(num_classes=CLASSES, **values)


_SETTINGS = {"NormFreeNet": "NfCfg", "MaxxVit": "MaxxVitCfg", "MultiScaleVit": "MultiScaleVitCfg"}


def _created(name: str, size: int, options: Options) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, num_classes=CLASSES, img_size=size, **options)
    except TypeError as error:  # convolutions take any size
        if "img_size" not in str(error):
            raise
        return timm.create_model(name, num_classes=CLASSES, **options)


def _classification(build: Callable[[], nn.Module], size: int) -> Objects:
    torch.manual_seed(0)
    net = without_dropout(build())
    return Objects(net, torch.randn(BATCH, 3, size, size), nn.CrossEntropyLoss(), torch.randint(0, CLASSES, (BATCH,)))


def _cases() -> Iterator[Case]:
    for family in MODELS:
        builders: dict[str, tuple[int, Callable[[], nn.Module]]] = {}
        for name, (size, options) in MODELS[family].items():
            builders[name] = (size, functools.partial(_created, name, size, options))
        for name, (size, path, options) in CONFIGURED[family].items():
            builders[name] = (size, functools.partial(_configured, path, options))
        for name, (size, build) in builders.items():
            yield Case(f"timm, {family}", name, "torch", functools.partial(_classification, build, size), ("timm",))


CASES = list(_cases())
