"""The kinds of paths that are given as a model, each with what it is and the one command or step that helps."""

from __future__ import annotations

from dataclasses import dataclass

EXPORT = "staticllm export {model} {out}"
EXPORT_ORIGINAL = "staticllm export ORIGINAL {out}"
EXPORT_OTHER = "optimum-cli export openvino --model {model} --task {task} --weight-format int8 {out}"
"""For models that staticllm does not run."""
_MADE_FROM = f"export the model that it was made from: {EXPORT_ORIGINAL}"


@dataclass(frozen=True)
class PathKind:
    """One kind of path.

    Both texts may name ``{model}`` (the path, quoted for a shell), ``{out}`` (a folder for what a command writes), ``{task}``
    (of an export) and ``{found}`` (the names that decided). Only ``OPENVINO`` and ``GGUF`` can be loaded, and models in parts
    (``has_parts``) by what is for the kind of this ``name``.
    """

    name: str
    what: str
    """A predicate (``holds a GGUF model``)"""
    remedy: str = ""
    """The one command or step that helps."""
    has_parts: bool = False


OPENVINO = PathKind("openvino", "holds an OpenVINO model")
NO_TOKENIZER = PathKind(
    "no tokenizer",
    "holds an OpenVINO model, but {found} is missing",
    f"export it again with its tokenizer: {EXPORT_ORIGINAL}",
)
TOKENIZER_TO_CONVERT = PathKind(
    "no tokenizer",
    "holds an OpenVINO model, but {found} is missing",
    "make it of the tokenizer.json there: convert_tokenizer {model} --with-detokenizer -o {model} "
    '(pip install "openvino-tokenizers[transformers]")',
)
LFS_POINTERS = PathKind("git-lfs", "holds git-lfs pointers in place of {found}", "git -C {model} lfs pull")
IMAGES = PathKind(
    "images",
    "holds a model for images and text (openvino_language_model.xml)",
    "load it with openvino_genai.VLMPipeline, or export a model for text alone",
)
LANGUAGE_PART = PathKind(
    "images",
    "holds a model for images and text, whose language model takes token ids",
    "for text alone rename openvino_language_model.xml and .bin to openvino_model.xml and .bin",
)
TRANSLATION = PathKind(
    "translation",
    "holds a model with an encoder and a decoder, as for translation",
    "load it with OVModelForSeq2SeqLM of optimum-intel, or export a model with a decoder alone",
)
DRAWING = PathKind(
    "drawing", "holds a model that makes images (model_index.json)", "load it with openvino_genai.Text2ImagePipeline"
)
GGUF = PathKind("gguf", "holds a GGUF model ({found})")
GGUFS = PathKind("several", "holds several GGUF models", "give one of the files: {found}")
HUGGING_FACE = PathKind("hugging face", "holds a Hugging Face model ({found})", f"export it: {EXPORT}")
HUGGING_FACE_IMAGES = PathKind(
    "hugging face",
    "holds a Hugging Face model for images and text ({found})",
    "export it and load it with openvino_genai.VLMPipeline, or export a model for text alone",
)
HUGGING_FACE_SPEECH = PathKind(
    "hugging face",
    "holds a Hugging Face model for speech ({found})",
    "staticllm export makes no speech models, but its environment has the program that does (staticllm export --setup prints the "
    "folder): FOLDER/bin/optimum-cli export openvino --model {model} --task automatic-speech-recognition-with-past {out}; then "
    "staticllm transcribe FILE -m {out}",
)
HUGGING_FACE_TRANSLATION = PathKind(
    "hugging face",
    "holds a Hugging Face model ({found}) with an encoder and a decoder, as for translation",
    f"export it and load it with OVModelForSeq2SeqLM of optimum-intel: {EXPORT_OTHER}; or export a model with a decoder alone",
)
HUGGING_FACE_OTHER = PathKind(
    "hugging face",
    "holds a Hugging Face model ({found}) that is no language model, embedder or reranker for text alone",
    "give one that is, or export it and load it with the class for it in optimum-intel",
)
ADAPTER = PathKind(
    "adapter",
    "holds a LoRA adapter, which changes a model",
    "give the model, and the adapter with adapters= (docs/generation.md) or `staticllm compile --adapter`",
)
ADAPTER_AS_PICKLE = PathKind(
    "adapter as pickle",
    "holds a LoRA adapter as {found}",
    "save it as safetensors: model.save_pretrained(folder, safe_serialization=True) of PEFT",
)
CTRANSLATE2 = PathKind("ctranslate2", "holds a CTranslate2 model (model.bin)", _MADE_FROM)
ONNX = PathKind("onnx", "holds an ONNX model ({found})", _MADE_FROM)
TOKENIZER = PathKind(
    "tokenizer", "holds a tokenizer without a model (openvino_model.xml)", f"export both: {EXPORT_ORIGINAL}"
)
OTHER_OPENVINO = PathKind(
    "other openvino",
    "holds {found} but no openvino_model.xml",
    f"rename it and its .bin to openvino_model, or export the model again: {EXPORT_ORIGINAL}",
)
BLOB = PathKind(
    "blob", "is a compiled program", "give the folder of the model, and that of the blob set with -p BLOB_PATH={set}"
)
BLOB_SET = PathKind(
    "blob set",
    "is a blob set of compiled programs",
    "give the folder of the model, and this one with -p BLOB_PATH={model}",
)
CACHE = PathKind(
    "cache", "is a cache of compiled programs", "give the folder of the model, and this one with -p CACHE_DIR={model}"
)
ARCHIVE = PathKind("archive", "is an archive", "unpack it, and give the folder")
ARCHIVES = PathKind("archive", "holds an archive ({found})", "unpack it, and give the folder that comes out")
SUBFOLDER = PathKind("subfolder", "holds its model in a subfolder", "give {found}")
SEVERAL = PathKind("several", "holds several models", "give one of them: {found}")
EMPTY = PathKind(
    "empty",
    "is empty, openvino_model.xml is missing",
    "export a model into it: staticllm export ORIGINAL {model}",
)
NOTHING = PathKind(
    "nothing",
    "holds no model ({found}), openvino_model.xml is missing",
    f"give the folder that holds openvino_model.xml; {EXPORT_ORIGINAL} writes one",
)
FILE = PathKind("file", "is a file that is no model", "give the directory that holds openvino_model.xml, or that file")
MISSING = PathKind("missing", "", "check the path")
HUB_NAME = PathKind("missing", "", "if it is a name on Hugging Face, bring it here: staticllm pull {model}")
HUB_REVISIONS = PathKind("missing", "", "give one of those that the cache has, {found}, or: staticllm pull {model}")
"""A name without a revision, of which the cache has several, and none that is known as the main one."""
HUB_NAME_ALONE = PathKind(
    "missing",
    "",
    'if it is a name on Hugging Face, install what asks there: pip install "staticllm[hub]"; then staticllm pull {model}',
)
"""A name on Hugging Face, without the package that knows its cache."""
