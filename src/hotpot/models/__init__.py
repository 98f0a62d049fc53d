"""The policy's forward pass (the learner's, and what every engine must agree with), its weights, its tokenizer, and the folders they live in."""

from hotpot.models.decoder import Decoder, DecoderConfig, KeyValueCache
from hotpot.models.files import load_decoder, save_model
from hotpot.models.machine import arithmetic
from hotpot.models.threads import measure_threads, training_work, use_threads
from hotpot.models.tokenizer import PolicyTokenizer, train_tokenizer
from hotpot.models.weights import Weights, checksum, copy_weights

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KeyValueCache",
    "PolicyTokenizer",
    "Weights",
    "arithmetic",
    "checksum",
    "copy_weights",
    "load_decoder",
    "measure_threads",
    "save_model",
    "train_tokenizer",
    "training_work",
    "use_threads",
]
