"""Private names of libraries that the code uses: each may change in any release, and costs a look at each upgrade.

Name -> (what for, where upstream defines it). tests/test_architecture.py refuses any other.
"""

TORCH = "https://github.com/pytorch/pytorch/blob/main/"
TRANSFORMERS = "https://github.com/huggingface/transformers/blob/main/src/transformers/"
NATIVE = TORCH + "aten/src/ATen/native/native_functions.yaml"
C10D = TORCH + "torch/csrc/distributed/c10d/init.cpp"

NAMES: dict[str, tuple[str, str]] = {
    # Operators, which have no other names
    "_c10d_functional": ("collectives in traced graphs", TORCH + "torch/csrc/distributed/c10d/Functional.cpp"),
    "_foreach_add_": ("one kernel for many tensors", NATIVE),
    "_foreach_copy_": ("one kernel for many tensors", NATIVE),
    "_foreach_sub_": ("one kernel for many tensors", NATIVE),
    "_fused_adamw_": ("AdamW's kernel, without the class around it", NATIVE),
    "_fused_sdp_choice": ("which attention kernel torch chooses, for the log", NATIVE),
    "_schema": ("arguments of an operator by name", TORCH + "torch/_ops.py"),
    "_ops": ("the type of an operator", TORCH + "torch/_ops.py"),
    "_scaled_dot_product_cudnn_attention": ("kept by selective checkpointing", NATIVE),
    "_scaled_dot_product_efficient_attention": ("kept by selective checkpointing", NATIVE),
    "_scaled_dot_product_flash_attention": ("kept by selective checkpointing", NATIVE),
    "_scaled_dot_product_flash_attention_for_cpu": ("kept by selective checkpointing", NATIVE),
    "_scaled_mm": ("kept by selective checkpointing", NATIVE),
    "_unsafe_view": ("found in traced graphs", NATIVE),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("gradients of attention with sinks", NATIVE),
    "_varlen_attn_backward": ("gradients of attention with sinks", TORCH + "torch/nn/attention/varlen.py"),
    "_varlen_attn": ("kept by selective checkpointing", TORCH + "torch/nn/attention/varlen.py"),
    # Distributed
    "_checkpoint": ("checkpoint_wrapper", TORCH + "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py"),
    "_device_types": ("the time-out of the default group", C10D),
    "_distributed_c10d": ("NCCL's flight recorder", C10D),
    "_dump_fr_trace": ("the flight recorder of torch 2.15's NCCL", C10D),
    "_dump_nccl_trace": ("NCCL's flight recorder", C10D),
    "_flatten": ("several axes of a mesh as one", TORCH + "torch/distributed/device_mesh.py"),
    "_functional_collectives": ("all-to-all with gradients", TORCH + "torch/distributed/_functional_collectives.py"),
    "_fsdp_common": (
        "a mesh for each parameter of a unit",
        TORCH + "torch/distributed/fsdp/_fully_shard/_fsdp_common.py",
    ),
    "_fsdp_init": ("a mesh as FSDP knows it", TORCH + "torch/distributed/fsdp/_fully_shard/_fsdp_init.py"),
    "_fully_shard": ("the two above and below", TORCH + "torch/distributed/fsdp/_fully_shard/__init__.py"),
    "_fsdp_param_group": ("gathered weights, counted", TORCH + "torch/distributed/fsdp/_fully_shard/_fsdp_state.py"),
    "_get_backend": ("the time-out of the default group", C10D),
    "_get_fsdp_state": ("gathered weights, counted", TORCH + "torch/distributed/fsdp/_fully_shard/_fully_shard.py"),
    "_get_mesh_info": ("a mesh as FSDP knows it", TORCH + "torch/distributed/fsdp/_fully_shard/_fsdp_init.py"),
    "_local_tensor": ("FSDP's extension of a shard", TORCH + "torch/distributed/tensor/_api.py"),
    "_root_post_backward_final_callback": (
        "gradients that FSDP reduces after a pipeline's schedule",
        TORCH + "torch/distributed/fsdp/_fully_shard/_fsdp_state.py",
    ),
    "_StridedShard": ("shards of what is cut already", TORCH + "torch/distributed/tensor/placement_types.py"),
    "_symmetric_memory": ("fused tensor-parallel messages", TORCH + "torch/distributed/_symmetric_memory/__init__.py"),
    "_utils": ("where a shard lies in its tensor", TORCH + "torch/distributed/tensor/_utils.py"),
    # Compiling
    "_dynamo": ("limits and marks of torch.compile", TORCH + "torch/_dynamo/config.py"),
    "_inductor": ("passes over graphs; options of a mode", TORCH + "torch/_inductor/custom_graph_pass.py"),
    # Memory
    "_accelerator_getAllocatorSettings": ("what the allocator was set to", TORCH + "torch/csrc/DeviceAccelerator.cpp"),
    "_accelerator_setAllocatorSettings": ("expandable segments", TORCH + "torch/csrc/DeviceAccelerator.cpp"),
    "_C": ("the two above", TORCH + "torch/csrc/Module.cpp"),
    "_dump_snapshot": ("what memory held when it ran out", TORCH + "torch/cuda/memory.py"),
    # Steps without values, to count
    "_cdata": ("storages told apart", TORCH + "torch/csrc/Storage.cpp"),
    "_clear_sharding_prop_cache": ("counts that start anew", TORCH + "torch/distributed/tensor/debug/__init__.py"),
    "_internal": ("processes that are not there", TORCH + "torch/testing/_internal/distributed/fake_pg.py"),
    "_python_dispatch": ("operators watched", TORCH + "torch/utils/_python_dispatch.py"),
    "_pytree": ("tensors inside results", TORCH + "torch/utils/_pytree.py"),
    "_subclasses": ("tensors without values", TORCH + "torch/_subclasses/fake_tensor.py"),
    # Modules
    "_buffers": ("tied buffers, once", TORCH + "torch/nn/modules/module.py"),
    "_version": ("whether initialization has changed a tensor", TORCH + "torch/csrc/autograd/python_variable.cpp"),
    "_DropoutNd": ("what drops numbers", TORCH + "torch/nn/modules/dropout.py"),
    # Other libraries
    "_attn_implementation": ("the kernel that was chosen", TRANSFORMERS + "configuration_utils.py"),
    "_filters": ("what a task does to answers", "https://github.com/EleutherAI/lm-evaluation-harness"),
    "_ignore_bidirectional_mask_sdpa": ("masks without a look at tensors", TRANSFORMERS + "masking_utils.py"),
    "_init_weights": ("the model's own initial values", TRANSFORMERS + "modeling_utils.py"),
    "_keys_to_ignore_on_load_unexpected": ("names that a folder may have", TRANSFORMERS + "modeling_utils.py"),
    "_model_mapping": ("which class a config names", TRANSFORMERS + "models/auto/auto_factory.py"),
    "_no_split_modules": ("where the blocks are", TRANSFORMERS + "modeling_utils.py"),
    "_data": ("rows in float8, which are gathered as bytes", "https://github.com/pytorch/ao"),
    "_supports_sdpa": ("whether a kernel fits", TRANSFORMERS + "modeling_utils.py"),
}
