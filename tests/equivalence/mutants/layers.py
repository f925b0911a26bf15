"""Mutants of layers, adapters, initial weights and inputs of blocks in the host's memory. Imports no torch."""

from .mutant import Mutant

LAYERS, INIT, LORA, READER, HF = (
    "core/models/layers.py",
    "core/models/init.py",
    "core/parallel/lora.py",
    "core/checkpoint/reader.py",
    "core/models/hf.py",
)
EXACT, QWEN, MASKED = (
    "llama3, against float64",
    "qwen3, single, against float64",
    "llama3, tied, documents, uneven mask, against float64",
)
ADAPTED = "lora, against float64"
FSDP, TP = "fsdp 2", "tp 2, sequence parallel on, loss parallel on"
LORA_TESTS, CONVERT = "tests/core/train/test_lora.py", "tests/core/checkpoint/test_convert.py"
LOGITS = f"{CONVERT}::test_transformers_computes_the_same_logits"
OWN = "tests/core/parallel/test_own_modules.py"
OFFLOAD, PRETENDED = "core/parallel/offload.py", "tests/pretended_cuda/test_layouts.py"
STEPS_WITHOUT_FAULT = f"{PRETENDED}::test_a_layout_steps_without_fault[llama3, fsdp 2, ac offload]"
HOLDS = f"{PRETENDED}::test_a_layout_holds_on_the_host_and_on_the_device_what_a_plan_counts"

# fmt: off
MUTANTS = [
    Mutant("attention's norm has another epsilon", "any", LAYERS, "self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)",
           "self.attention_norm = nn.RMSNorm(config.dim, eps=1e-3)", "All layouts have the same wrong epsilon.", (EXACT,)),
    Mutant("the last norm has another epsilon", "any", LAYERS, "self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)",
           "self.norm = nn.RMSNorm(config.dim)", "The norm before the head has torch's default epsilon.", (EXACT,)),
    Mutant("keys have the norm of queries", "any", LAYERS, "self.q_norm(q), self.k_norm(k)", "self.q_norm(q), self.q_norm(k)",
           "Queries and keys share the norm of the queries; the norm of the keys is not trained.", (QWEN,)),
    Mutant("keys are not rotated", "any", LAYERS, "rotate(q, rotary)), rotate(k, rotary)", "rotate(q, rotary)), k",
           "Only queries are rotated by their position.", (EXACT,)),
    Mutant("a rotation has a wrong sign", "any", LAYERS, "b * cos + a * sin", "b * cos - a * sin",
           "The second half of a pair is rotated the other way.", (EXACT,)),
    Mutant("positions are rotated in bfloat16", "bf16", LAYERS, "a, b = (half.float() for half in x.chunk(2, dim=-1))",
           "a, b = x.chunk(2, dim=-1)\n    cos, sin = cos.to(x.dtype), sin.to(x.dtype)",
           "Rotary positions are computed in the compute dtype, whose rounding grows with the position.", (),
           ("tests/core/models/test_llama3.py::test_rotation_is_in_fp32_and_rounds_once",)),
    Mutant("gate and up are exchanged", "any", LAYERS, "F.silu(self.w1(x)) * self.w3(x)", "F.silu(self.w3(x)) * self.w1(x)",
           "In a feed-forward, the up projection serves as the gate.", (EXACT,)),
    Mutant("a gate is detached", "any", LAYERS, "F.silu(self.w1(x)) * self.w3(x)", "F.silu(self.w1(x.detach())) * self.w3(x)",
           "The gate passes no gradient on; the loss of the first step is right.", (EXACT,)),
    Mutant("the residual stream passes no gradient", "any", LAYERS, "return x + scaled_by(self.branch_scale, self.attention(",
           "return x.detach() + scaled_by(self.branch_scale, self.attention(",
           "Gradients reach earlier blocks through attention alone.", (EXACT,)),
    Mutant("a tied head takes no gradient", "tied", LAYERS, "return self.embedding[0].weight\n",
           "return self.embedding[0].weight.detach()\n", "The head's part of a tied weight's gradient is missing.", (MASKED,)),
    Mutant("a tied weight is exported as a copy of nothing", "tied", HF, '"tie_word_embeddings": config.tie_embeddings,',
           '"tie_word_embeddings": False,', "An export says that the head has a weight of its own, but contains none.", (MASKED,),
           (LOGITS,)),
    Mutant("the base of positions is not exported", "any", HF, '"rope_theta": config.rope_theta,', '"rope_theta": 10000.0,',
           "An exported model rotates by other angles.", (MASKED,), (LOGITS,)),
    Mutant("gate and up are exchanged in an export", "any", HF,
           '"feed_forward.w1": "mlp.gate_proj",\n    "feed_forward.w2": "mlp.down_proj",\n    "feed_forward.w3": "mlp.up_proj",',
           '"feed_forward.w1": "mlp.up_proj",\n    "feed_forward.w2": "mlp.down_proj",\n    "feed_forward.w3": "mlp.gate_proj",',
           "In an export, gate and up of each feed-forward have each other's Hugging Face name.", (MASKED,), (LOGITS,)),
    Mutant("an export is bfloat16 whatever is stored", "any", "core/checkpoint/convert.py", "dtype or stored.get(name)) for",
           "dtype or torch.bfloat16) for", "An export of float32 weights loses their lower bits.", (MASKED,),
           (f"{CONVERT}::test_an_export_keeps_the_stored_number_format",)),
    Mutant("low frequencies are not stretched", "any", "core/models/llama3/model.py", "/ scaling.factor", "/ 1", "Llama 3.1's scaling is lost.",
           (EXACT,), ("tests/core/models/test_llama3.py::test_rope_scaling_keeps_fast_frequencies_and_stretches_slow_ones",)),

    # initial weights
    Mutant("initial weights depend on the rank", "fsdp", INIT, 'hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8)',
           'hashlib.blake2b(f"{seed + torch.distributed.get_rank()}:{fqn}".encode(), digest_size=8)',
           "Each rank draws its shards with another seed.", (FSDP,)),
    Mutant("shards begin with the first numbers", "fsdp", INIT, "first = offsets[dim] + (start if dim == 0 else 0)",
           "first = start if dim == 0 else 0", "Each shard is drawn as if it were the first of its tensor.", (FSDP, TP)),
    Mutant("columns of a shard begin with the first numbers", "tp", INIT, "first = offsets[dim] + (start if dim == 0 else 0)",
           "first = offsets[0] + start if dim == 0 else 0", "All shards along the second dimension get the same numbers.", (TP,)),
    Mutant("blocks are drawn as deep as the first", "any", LAYERS, "Normal(0.02 / math.sqrt(2 * (int(layer) + 1)))",
           "Normal(0.02 / math.sqrt(2))", "The initial matrices that write to the residual stream do not get smaller with depth.", (EXACT,),
           ("tests/core/models/test_init.py::test_distribution_of_each_parameter",)),

    # adapters
    Mutant("an adapter is not scaled", "lora", LORA, "lora.factor, lora.reduce_dtype = config.alpha / rank,",
           "lora.factor, lora.reduce_dtype = config.alpha,", "An adapter's product is multiplied by alpha, not alpha / rank.", (ADAPTED,),
           (f"{LORA_TESTS}::test_merged_weights_are_the_base_and_the_product",)),
    Mutant("an adapter starts too large", "lora", LORA, 'lora.initial_std = {"lora_a": (3 * inputs) ** -0.5',
           'lora.initial_std = {"lora_a": inputs**-0.5',
           "A starts with 1.7 times the standard deviation of the paper's code.", (ADAPTED,),
           (f"{LORA_TESTS}::test_a_starts_as_in_the_papers_code_and_b_at_zero",)),
    Mutant("adapters are merged without their factor", "lora", READER, "alpha=self.factor)", "alpha=1.0)",
           "An export adds B A to the weight, not factor B A.", (), (f"{LORA_TESTS}::test_merged_weights_are_the_base_and_the_product",)),
    Mutant("the base of adapters is trained", "lora", LORA,
           "nn.Parameter(parameter.detach().to(dtype), requires_grad=False)", "nn.Parameter(parameter.detach().to(dtype))",
           "Frozen weights take gradients, and are trained.", (ADAPTED,),
           (f"{LORA_TESTS}::test_the_base_is_frozen_and_adapters_begin_as_nothing",)),
    Mutant("the base of adapters stays float32 under tp", "lora, tp", LORA,
           "owner.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))",
           "parameter.requires_grad_(False).data = parameter.data.to(dtype)",
           "Only the DTensor has the compute dtype; its local tensor stays float32.",
           ("bf16, lora, tp 2",)),
    Mutant("an export of adapters has A and B exchanged", "lora", "core/checkpoint/convert.py", '("lora_A", "lora_a"), ("lora_B", "lora_b")',
           '("lora_A", "lora_b"), ("lora_B", "lora_a")', "PEFT loads the matrices in each other's place.", (),
           (f"{LORA_TESTS}::test_exports_load_in_transformers_and_peft",)),
    Mutant("a ring drops an attention kernel of one's own", "cp", "core/parallel/context.py",
           "if record.ring and type(attention.sdpa) is not SDPA:", "if False:",
           "Torch's attention kernel silently replaces a user's kernel.", (),
           (f"{OWN}::test_a_ring_refuses_an_attention_kernel_that_it_would_replace",)),

    # inputs of blocks in the host's memory; only the pretended device has streams
    Mutant("a block gets the input of the block before", "ac=offload", OFFLOAD, "            return on_host.host\n",
           "            return self.waiting.get(on_host.number - 1, on_host).host\n",
           "A block is computed again from the input of another block.", ("pp 2, ac offload",)),
    Mutant("an input is freed before it is on the host", "ac=offload", OFFLOAD,
           "            torch.cuda.current_stream(last.device).wait_event(last.copied)\n", "",
           "The memory of an input is used again while it is copied.", (), (STEPS_WITHOUT_FAULT,)),
    Mutant("an input is read before it has arrived", "ac=offload", OFFLOAD,
           "        torch.cuda.current_stream(on_host.device).wait_event(on_host.copied)\n", "",
           "A block is computed again while its input is copied.", (), (STEPS_WITHOUT_FAULT,)),
    Mutant("a copy does not wait for the input", "ac=offload", OFFLOAD,
           "        self.stream.wait_stream(torch.cuda.current_stream(on_host.device))\n", "",
           "An input is copied to the host while it is computed.", (), (STEPS_WITHOUT_FAULT,)),
    Mutant("the event of a copy comes before it", "ac=offload", OFFLOAD,
           "            target.copy_(source, non_blocking=True)\n            on_host.copied = self.stream.record_event()\n",
           "            on_host.copied = self.stream.record_event()\n            target.copy_(source, non_blocking=True)\n",
           "What waits for the copy waits for nothing.", (), (STEPS_WITHOUT_FAULT,)),
    Mutant("inputs stay on the device until the device has copied", "ac=offload", OFFLOAD,
           "            torch.cuda.current_stream(last.device).wait_event(last.copied)\n",
           "            last.copy.record_stream(self.stream)\n",
           "The host queues the whole forward before the first input is free.", (), (f"{HOLDS}[llama3, fsdp 2, ac offload]",)),
    Mutant("losses keep what a stage has received", "ac=offload, pp", "core/parallel/pipeline.py",
           "            options[\"loss\"].detach_()\n", "            pass\n",
           "The last stage holds the inputs of all microbatches.", (), (f"{HOLDS}[llama3, pp 2, 1f1b, ac offload]",)),
]
# fmt: on
