"""Keys of `config.json` that say nothing about what a model computes, whatever its family.

Sources: `PretrainedConfig` (transformers/configuration_utils.py, 4.36 to 5.23) with the parameters of generation that
it held until 5, and what training tools add to the files that they save.
"""

from __future__ import annotations

OF_THE_FILE = frozenset(
    {"torch_dtype", "dtype", "transformers_version", "_name_or_path", "auto_map", "quantization_config"}
)
"""They describe the file that they stand in: a folder made of it says them anew, or not at all."""
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""How many multi-token prediction (MTP) layers a folder may have; those that transformers writes have none of them."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

_TEXT = """
    architectures model_type
# How it is called, and what it gives back.
    return_dict output_attentions output_hidden_states output_router_logits use_cache torchscript tf_legacy_loss
    use_bfloat16 chunk_size_feed_forward keys_to_ignore_at_inference cache_implementation attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset experts_implementation
    _experts_implementation _experts_implementation_internal use_flash_attn use_flash_attention_2 _flash_attn_2_enabled
    is_encoder_decoder is_decoder tie_encoder_decoder cross_attention_hidden_size tie_weights pretraining_tp
# Heads for classes, and what they are for.
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout prefix
# Tokens.
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id tokenizer_class
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
# Generation.
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty
# Training, and the tools that trained it.
    initializer_range router_aux_loss_coef aux_loss_alpha seq_aux unsloth_version unsloth_fixed model_max_length
    _commit_hash use_logn_attn_in_training ep_size
# The pruning of heads, of which none is left in a folder.
    pruned_heads
"""
WITHOUT_EFFECT = OF_THE_FILE.union(
    word for line in _TEXT.splitlines() if not line.startswith("#") for word in line.split()
)
