"""Fused attention: for training with its gradient, for a prompt, and for one query on a cache."""

# ruff: noqa: E501

TABLES: dict[str, str] = {
    "experiment_ops.h": """
FlashAttentionScore: query:half key:=query value:=query real_shift?:=query drop_mask?:uint8 padding_mask?:=query atten_mask?:bool+uint8,half -> softmax_max:float softmax_sum:float softmax_out:=query attention_out:=query | scale_value:Float=1.0 keep_prob:Float=1.0 pre_tockens:Int=2147483647 next_tockens:Int=2147483647 head_num:Int input_layout:String inner_precise:Int=1
FlashAttentionScoreGrad: query:half key:=query value:=query dy:=query pse_shift?:=query drop_mask?:uint8 padding_mask?:=query atten_mask?:bool+uint8,half softmax_max?:float softmax_sum?:float softmax_in?:=query attention_in?:=query -> dq:=query dk:=query dv:=query dpse:=query | scale_value:Float=1.0 keep_prob:Float=1.0 pre_tockens:Int=65536 next_tockens:Int=65536 head_num:Int input_layout:String inner_precise:Int=1
IncreFlashAttention: query:half key*:=query value*:=query padding_mask?:f16 atten_mask?:bool+uint8,f16 actual_seq_lengths?:int64 -> attention_out:=query | num_heads:Int scale_value:Float=1.0 input_layout:String=BSH num_key_value_heads:Int=1
PromptFlashAttention: query:half key:=query value:=query padding_mask?:f16 atten_mask?:bool+uint8,f16 actual_seq_lengths?:int64 -> attention_out:=query | num_heads:Int scale_value:Float=1.0 pre_tokens:Int=214748647 next_tokens:Int=0 input_layout:String=BSH num_key_value_heads:Int=1
"""
}
