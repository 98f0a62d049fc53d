"""The policy's forward pass (the learner's, and what every engine must agree with), its weights, its tokenizer, and the folders they live in."""

from hotpot.models.decoder import Decoder, KeyValueCache
from hotpot.models.decoder_config import DecoderConfig
from hotpot.models.files import Implementation, generation_config, load_decoder, load_policy, save_model
from hotpot.models.machine import arithmetic
from hotpot.models.memory import collect_young, keep_freed_memory, seldom_collected
from hotpot.models.policy import PastTokens, Policy, PolicyConfig
from hotpot.models.served import next_token_logprobs, save_served
from hotpot.models.threads import measure_threads, training_work, use_threads
from hotpot.models.tokenizer import PolicyTokenizer, train_tokenizer
from hotpot.models.weights import Weights, checksum, copy_weights

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Implementation",
    "KeyValueCache",
    "PastTokens",
    "Policy",
    "PolicyConfig",
    "PolicyTokenizer",
    "Weights",
    "arithmetic",
    "checksum",
    "collect_young",
    "copy_weights",
    "generation_config",
    "keep_freed_memory",
    "load_decoder",
    "load_policy",
    "measure_threads",
    "next_token_logprobs",
    "save_model",
    "save_served",
    "seldom_collected",
    "train_tokenizer",
    "training_work",
    "use_threads",
]
