"""Names of the tokenizer classes that Transformers uses."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Any

from quire.errors import ModelLoadError
from quire.tokenization.tokenizer_classes import CLASSES, FROM_FILE, TokenizerClass


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TYPES: Mapping[str, str] = MappingProxyType(
    {
        FROM_FILE: (
            "EvollaModel aria beam bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
            "glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite granitemoe granitemoehybrid "
            "granitemoeshared kimi_k25 kimi_linear kosmos-2 mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 "
            "ministral ministral3 mistral mistral3 mistral_large4 mixtral nemo_speechlm nystromformer olmo2 olmo3 "
            "olmo_hybrid pegasus_x persimmon pix2struct pixtral pocket_tts stablelm umt5 voxtral voxtral_realtime "
            "xlm-roberta-xl minicpmv chatlm molmo2 llava_next iquestcoder camembertv2-base ernie4_5_moe phi3 molmo "
            "phimoe hyperclovax_vlm modernbert ernie4_5 vipllava fuyu llava internlm3 jamba paddleocr_vl openvla "
            "smolvlm h2ovl_chat phi3_v opencua cohere_asr nemotron step3_vl hyperclovax modernbert-decoder nvfp4 "
            "minimax_m2 minicpm3 arctic internlm2"
        ),
        "AlbertTokenizer": "albert yoso",
        "BartTokenizer": "florence2",
        "BarthezTokenizer": "barthez",
        "BartphoTokenizer": "bartpho",
        "BertJapaneseTokenizer": "bert-japanese",
        "BertTokenizer": (
            "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava git grounding-dino "
            "layoutlm megatron-bert mm-grounding-dino nezha nomic_bert qdqbert realm retribert squeezebert tvp vilt "
            "visual_bert"
        ),
        "BertweetTokenizer": "bertweet",
        "BigBirdTokenizer": "big_bird",
        "BioGptTokenizer": "biogpt",
        "BlenderbotSmallTokenizer": "blenderbot-small",
        "BlenderbotTokenizer": "blenderbot",
        "ByT5Tokenizer": "byt5",
        "CLIPTokenizer": "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
        "CTRLTokenizer": "ctrl",
        "CamembertTokenizer": "camembert",
        "CanineTokenizer": "canine",
        "ClvpTokenizer": "clvp",
        "CodeLlamaTokenizer": "code_llama",
        "CohereTokenizer": "aya_vision cohere cohere2",
        "CpmAntTokenizer": "cpmant",
        "CpmTokenizer": "cpm",
        "DPRQuestionEncoderTokenizer": "dpr",
        "DebertaTokenizer": "deberta",
        "DebertaV2Tokenizer": "deberta-v2",
        "DiaTokenizer": "dia",
        "EsmTokenizer": "esm",
        "EsmcTokenizer": "esmc esmfold2",
        "FNetTokenizer": "fnet",
        "FSMTTokenizer": "fsmt",
        "FlaubertTokenizer": "flaubert",
        "FunnelTokenizer": "funnel",
        "GPT2Tokenizer": (
            "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 "
            "opt phi starcoder2"
        ),
        "GPTNeoXJapaneseTokenizer": "gpt_neox_japanese",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "GemmaTokenizer": (
            "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 "
            "t5gemma zaya"
        ),
        "HerbertTokenizer": "herbert",
        "LEDTokenizer": "led",
        "LasrTokenizer": "lasr_ctc lasr_encoder",
        "LayoutLMv2Tokenizer": "layoutlmv2",
        "LayoutLMv3Tokenizer": "layoutlmv3",
        "LayoutXLMTokenizer": "layoutxlm",
        "LlamaTokenizer": "idefics idefics2",
        "LukeTokenizer": "luke",
        "LxmertTokenizer": "lxmert",
        "MBart50Tokenizer": "mbart50",
        "MBartTokenizer": "mbart",
        "MPNetTokenizer": "mpnet",
        "MarkupLMTokenizer": "markuplm",
        "MgpstrTokenizer": "mgp-str",
        "MobileBertTokenizer": "mobilebert",
        "MvpTokenizer": "mvp",
        "MyT5Tokenizer": "myt5",
        "NllbTokenizer": "nllb nllb-moe",
        "NougatTokenizer": "nougat pp_formulanet",
        "OpenAIGPTTokenizer": "openai-gpt",
        "PLBartTokenizer": "plbart",
        "ParakeetTokenizer": (
            "granite_speech5_ctc nemotron3_5_asr nemotron_asr_streaming parakeet_ctc parakeet_rnnt parakeet_tdt"
        ),
        "PegasusTokenizer": "pegasus",
        "PerceiverTokenizer": "perceiver",
        "PhobertTokenizer": "phobert",
        "ProphetNetTokenizer": "prophetnet",
        "Qwen2Tokenizer": (
            "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
            "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl "
            "qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice"
        ),
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
        "RagTokenizer": "rag",
        "ReformerTokenizer": "reformer",
        "RemBertTokenizer": "rembert",
        "RoCBertTokenizer": "roc_bert",
        "RoFormerTokenizer": "roformer",
        "RobertaTokenizer": (
            "bart bridgetower clap data2vec-text ibert lilt longformer mega mra roberta roberta-prelayernorm"
        ),
        "SeamlessM4TTokenizer": "seamless_m4t seamless_m4t_v2",
        "Siglip2Tokenizer": "siglip2",
        "SplinterTokenizer": "splinter",
        "T5Tokenizer": "mt5 musicgen musicgen_melody switch_transformers t5",
        "TapasTokenizer": "tapas",
        "UdopTokenizer": "udop",
        "VideoPrismTokenizer": "videoprism",
        "VitsTokenizer": "vits",
        "Wav2Vec2CTCTokenizer": (
            "data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer"
        ),
        "Wav2Vec2PhonemeCTCTokenizer": "wav2vec2_phoneme",
        "WhisperTokenizer": "whisper",
        "XGLMTokenizer": "xglm",
        "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
        "XLMTokenizer": "xlm",
        "XLNetTokenizer": "xlnet",
    }
)
"""Class -> model types registered for it."""
_WRONGLY_NAMED = _words(
    "arctic camembertv2-base chatlm cohere_asr ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax "
    "hyperclovax_vision_v2 hyperclovax_vlm internlm2 internlm3 iquestcoder jamba llava llava_next minicpm3 "
    "minicpmv minimax_m2 modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 opencua openvla "
    "paddleocr_vl phi3 phi3_v phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2 smolvlm "
    "step3_vl vipllava"
)
"""Model types whose files name a wrong class: the registered one wins."""
_OTHER_CLASSES = _words(
    "Albert Barthez Bartpho BertGeneration BertJapanese Bertweet BigBird BioGpt BlenderbotSmall Blenderbot "
    "ByT5 CLIP CTRL Camembert Canine Clvp ConvBert CpmAnt Cpm DPRContextEncoder DPRQuestionEncoder DPRReader "
    "Deberta DebertaV2 Dia Esm Esmc FNet FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 "
    "Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM Mgpstr "
    "MyT5 Nllb Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert Pop2Piano ProphetNet Rag Reformer RemBert "
    "RoCBert RoFormer SeamlessM4T Siglip2 Siglip Speech2Text SpeechT5 Splinter T5 Tapas Tipsv2 Udop VideoPrism "
    "Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM XLM XLNet"
)
"""Names (without "Tokenizer") of classes that Transformers builds itself and that are not built here."""
_FROM_FILE_NAMES = (
    "deepseek-ai/deepseek-r1-distill-llama-*",
    "deepseek-ai/deepseek-coder-*",
    "allenai/dolma2-tokenizer",
    "google/umt5-small",
    "naver-clova-ix/donut-*",
    "salesforce/blip2-opt-*",
    "salesforce/blip2-flan-t5-*",
    "salesforce/instructblip-flan-t5-*",
    "stepfun-ai/step-3.7-*",
)
"""Lower-case names of models whose files name a wrong class."""
_REGISTERED: Mapping[str, str] = MappingProxyType(
    {model_type: name for name, types in _TYPES.items() for model_type in types.split()}
)
AS_IT_IS = 'tokenizer_class "PreTrainedTokenizerFast" in tokenizer_config.json takes tokenizer.json as it is'
_GENERIC = frozenset({FROM_FILE, "PreTrainedTokenizer", "PythonBackend"})


def find_class(
    name: str, config: Mapping[str, Any], model: Mapping[str, Any], *, is_byte_level: bool
) -> TokenizerClass | None:
    """Class that builds the tokenizer of a directory; None: use tokenizer.json unchanged.

    name: the model's, as the user gives it. config: tokenizer_config.json. model: config.json. is_byte_level:
        tokenizer.json has a byte-level step. Raises ModelLoadError for a class that is not built here.
    """
    found = class_name(name, config, model, is_byte_level=is_byte_level)
    if found.removesuffix("Tokenizer") in _OTHER_CLASSES:
        raise ModelLoadError(
            f"its tokenizer_class is {found}, which makes other tokens than tokenizer.json describes and is not "
            f"supported; {AS_IT_IS}"
        )
    return CLASSES.get(found)


def class_name(name: str, config: Mapping[str, Any], model: Mapping[str, Any], *, is_byte_level: bool) -> str:
    """Name of that class, without "Fast"; FROM_FILE or an unknown name if there is none."""
    kinds = [kind for kind in (model.get("model_type"), model.get("model_name")) if isinstance(kind, str)]
    registered = _REGISTERED.get(str(model.get("model_type")), "")
    wrongly_named = not _WRONGLY_NAMED.isdisjoint(kinds)
    named = _plain(config.get("tokenizer_class")) or _plain(model.get("tokenizer_class"))
    if _own_code(config.get("auto_map")) is None:
        if any(fnmatch(name.lower(), pattern) for pattern in _FROM_FILE_NAMES):
            return FROM_FILE
        if named == "LlamaTokenizer" and is_byte_level and not wrongly_named:
            return FROM_FILE
        if named and registered and registered != named:
            chosen = registered if wrongly_named else named
            return FROM_FILE if registered == FROM_FILE or chosen in _GENERIC else chosen
    return named or registered or FROM_FILE


def _plain(name: object) -> str:
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def _own_code(auto_map: object) -> object:
    return auto_map.get("AutoTokenizer") if isinstance(auto_map, Mapping) else auto_map
