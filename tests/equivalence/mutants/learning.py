"""Mutants of optimizers, learning rates, resuming and the order of data. Imports no torch."""

from .mutant import Mutant

OPTIMIZER, MUON, TRAINER, STATE, EMA = (
    "core/train/optimizer.py",
    "core/train/muon.py",
    "core/train/trainer.py",
    "core/checkpoint/state.py",
    "core/train/ema.py",
)
LOADER, STREAMS, MIXTURE, ITEMS = (
    "core/data/loader.py",
    "core/data/streams.py",
    "core/data/mixture.py",
    "core/data/items.py",
)
EXACT, MASKED, MUON_EXACT = (
    "llama3, against float64",
    "llama3, tied, documents, uneven mask, against float64",
    "llama3, muon, against float64",
)
MIXTURE_EXACT = "llama3, a mixture, validated, against float64"
QWEN_MUON, FSDP = "qwen3_moe, fsdp 2, ep 2, muon", "fsdp 2"
RESUMED, MUON_RESUMED, DOCUMENTS_RESUMED = "fsdp 2, resumed", "fsdp 2, muon, resumed", "fsdp 2, documents, resumed"
FORKED = ("bf16, tp 2, other keys then, against float64", "sgd, fsdp 2, other keys then, against float64")
AVERAGED, AVERAGES = "moving average, tp 2, then fsdp 2, against float64", "tests/core/train/test_ema.py"
RESUME = "tests/core/checkpoint/test_resume.py::test_a_resumed_run_goes_on_where_it_stopped"
CLIPPED = "tests/core/train/test_optimizer.py::test_gradients_are_divided_by_the_clipping_factor_and_nothing_changes"
OFFLOADED, OFFLOAD_TESTS = "core/train/offloaded.py", "tests/core/train/test_offloaded.py"
STATES = "tests/pretended_cuda/test_layouts.py::test_a_layout_steps_without_fault[llama3, fsdp 2, states offloaded]"
LOADS, STREAM_TESTS = "tests/core/data/test_loader.py", "tests/core/data/test_streams.py"

# fmt: off
MUTANTS = [
    # optimizers
    Mutant("weights become not a number after step 2", "any", TRAINER, "        self.drop_gradients()\n\n",
           "        self.drop_gradients()\n        self.steps = getattr(self, 'steps', 0) + 1\n"
           "        for weight in self.model.parameters():\n"
           "            weight.data.mul_(float('nan') if self.steps == 2 else 1)\n\n",
           "All weights are NaN, in the reference too.", (FSDP,)),
    Mutant("norms are in no optimizer", "muon", OPTIMIZER, "        (matrices if",
           "        if parameter.ndim == 1:\n            continue\n        (matrices if", "Norms are not trained.", (MUON_EXACT,)),
    Mutant("layouts forget the weight decay", "fsdp", OPTIMIZER, "weight_decay=config.weight_decay,\n        fused",
           "weight_decay=config.weight_decay * (torch.distributed.get_world_size() == 1),\n        fused",
           "AdamW decays weights only in jobs of one process.", (FSDP, "float8 rowwise, fsdp 2", "bf16, fsdp 2, accumulation 2")),
    Mutant("layouts have another epsilon of AdamW", "fsdp", OPTIMIZER, "eps=config.eps,",
           "eps=config.eps + 1e-4 * (torch.distributed.get_world_size() > 1),", "AdamW's epsilon is 1e-4 on several ranks.",
           (FSDP, "float8 rowwise, fsdp 2", "bf16, tp 2, sequence parallel on")),
    Mutant("AdamW's betas are exchanged", "any", OPTIMIZER, "betas=(config.beta1, config.beta2),", "betas=(config.beta2, config.beta1),",
           "The decay rates of AdamW's two moments are exchanged.", (EXACT,)),
    Mutant("weight decay is left out of vectors", "any", OPTIMIZER, "if not config.decay_matrices_only:", "if False:",
           "Norms get no weight decay although decay_matrices_only is off.", (EXACT,)),
    Mutant("matrices are spared from weight decay", "any", OPTIMIZER, "if (p.ndim > 1) is wanted]", "if (p.ndim > 1) is not wanted]",
           "With decay_matrices_only, vectors decay and matrices do not.", (MASKED,)),
    Mutant("gradients are not clipped", "any", OPTIMIZER, "fused.grad_scale, fused.found_inf = divisor,",
           "fused.grad_scale, fused.found_inf = divisor * 0 + 1,", "The optimizer ignores max_norm.", (EXACT,)),
    Mutant("all gradients are scaled to max_norm", "any", TRAINER, "/ limit).clamp(min=1.0)", "/ limit)",
           "Gradients that are smaller than max_norm are enlarged.", ("lora, against float64",), ("tests/core/train/test_optimizer.py",)),
    Mutant("a step that is not finite is made", "any", OPTIMIZER, "(~finite).float()", "(~finite).float() * 0",
           "Weights become NaN with the first loss that is NaN.", (),
           (f"{CLIPPED}_where_they_are_not_finite",)),
    Mutant("the average of the weights does not begin anew", "any", EMA, "max(1 - decay, 1 / group[COUNT])", "(1 - decay)",
           "The average begins at zero, and is too small in the first steps.", (AVERAGED,)),
    Mutant("the held-out loss is that of the weights", "any", EMA, "                set_master(parameter, average.to(weight.device))", "                pass",
           "Validation ignores the average.", (AVERAGED,), (AVERAGES,)),
    Mutant("gathered weights outlive a validation", "any", EMA, "            module.reshard()", "            pass",
           "With reshard_after_forward=never, a step after a validation uses the averages.", (), (AVERAGES,)),
    Mutant("gradients of norms pile up", "any", TRAINER, "            optimizer.zero_grad()\n",
           "            kept = [(p, p.grad) for group in optimizer.param_groups for p in group['params'] if p.ndim == 1]\n"
           "            optimizer.zero_grad()\n            for p, gradient in kept:\n                p.grad = gradient\n",
           "Gradients of vectors are not reset after a step.", (EXACT,)),
    Mutant("Muon's rate is that of a shard", "muon", MUON, 'options["adjust_lr_fn"], matrix.shape[-2:])',
           'options["adjust_lr_fn"], local_part(matrix).shape[-2:])',
           "Muon's learning rate follows the shape of a shard, not that of the whole matrix.",
           ("fsdp 2, muon", QWEN_MUON, "hsdp 4, muon")),
    Mutant("Muon on layouts has no Nesterov momentum", "muon", MUON, 'lerp(momentum, options["momentum"])',
           'lerp(momentum, options["momentum"] if self.group is None else 1)', "Layouts orthogonalize the plain momentum, not Nesterov's.",
           ("fsdp 2, muon", QWEN_MUON)),
    Mutant("Muon orthogonalizes shards", "muon", MUON, "        if self.group is None:\n", "        if True:\n",
           "Each rank orthogonalizes its own rows, not the whole matrix.", ("fsdp 2, muon", QWEN_MUON)),
    Mutant("Muon orthogonalizes a stack of experts as one", "muon", MUON, "            if whole.ndim > 2:\n",
           "            if whole.ndim > 2:\n                return orthogonalize(whole.flatten(0, 1)).view_as(whole)\n"
           "            if whole.ndim > 2:\n",
           "Experts are not orthogonalized one by one.", ("qwen3_moe, muon, against float64",),
           ("tests/core/parallel/test_experts.py::test_muon_takes_each_expert_as_a_matrix_of_its_own",)),

    # rates
    Mutant("the warm-up is one step late", "any", OPTIMIZER, "return step / config.warmup_steps", "return (step - 1) / config.warmup_steps",
           "The first step has a learning rate of zero.", (EXACT,)),
    Mutant("the last step has a rate of zero", "any", OPTIMIZER, "left = (steps + 1 - step) / decay_steps",
           "left = (steps - step) / decay_steps",
           "The learning rate reaches zero one step early.", (MASKED,), ("tests/core/train/test_optimizer.py",)),
    Mutant("wsd's decay is rounded down", "any", OPTIMIZER, "round(steps * config.decay_ratio)", "int(steps * config.decay_ratio)",
           "A decay whose share of the steps is no whole number is one step shorter.", ("lora, against float64",),
           ("tests/core/train/test_optimizer.py",)),
    Mutant("a cosine is a line", "any", OPTIMIZER, 'steps - config.warmup_steps, "cosine")', 'steps - config.warmup_steps, "linear")',
           "The learning rate falls linearly, not along a cosine.", (MASKED,), ("tests/core/train/test_optimizer.py",)),
    Mutant("the second optimizer keeps its first rate", "muon", OPTIMIZER,
           '    for optimizer in optimizers:\n        for group in optimizer.param_groups:\n            group["lr"] =',
           '    for optimizer in optimizers[:1]:\n        for group in optimizer.param_groups:\n            group["lr"] =',
           "Muon's learning rate has no warm-up and no decay.", (MUON_EXACT,)),

    # resuming
    Mutant("moments are not loaded", "resume", "core/checkpoint/checkpointer.py", "self._load(path, PARTS, self.model)",
           'self._load(path, {"model"}, self.model)',
           "A resumed run starts with optimizer moments of zero.", (RESUMED,), (RESUME,)),
    Mutant("a resumed run has the last rate as its peak", "resume", STATE, "    return {name: value for name, value in held.items() if",
           "    return {name.replace('.lr', '.peak_lr'): value for name, value in held.items() if name.endswith('.lr')} | {\n"
           "        name: value for name, value in held.items() if",
           "The peak learning rate of a resumed run is the rate of the saved step.", (RESUMED, MUON_RESUMED), (RESUME,)),
    Mutant("another run's optimizer brings its decay and betas", "resume", STATE, " if not _equal(value, first)\n", "\n",
           "A run that loads the optimizer of another run trains with that run's options, not with its own.", FORKED,
           ("tests/core/checkpoint/test_options.py::test_a_fork_has_its_own_options_of_the_optimizer",), "NVIDIA/Megatron-LM#5212"),
    Mutant("state in parameter groups begins anew", "resume", STATE, "held | state | changed", "held | state",
           "State that an optimizer of the user's keeps in its parameter groups begins anew.", (),
           ("tests/core/checkpoint/test_options.py::test_state_in_parameter_groups_goes_on",)),
    Mutant("random numbers begin anew", "resume", STATE, '        torch.set_rng_state(_decode(random["cpu"]))\n', "",
           "A resumed run draws the random numbers of its first steps again.", (RESUMED,),
           ("tests/core/checkpoint/test_resume.py::test_random_numbers_go_on",), "ai2cm/ace#690"),
    Mutant("data begins anew", "resume", LOADER, 'self.step, self.known = state["step"],', "self.step, self.known = 0,",
           "A resumed run reads the samples of its first steps again.", (RESUMED,),
           (f"{LOADS}::test_goes_on_exactly_from_a_saved_state_on_other_ranks", RESUME), "huggingface/accelerate#2016"),
    Mutant("samples that were prepared count as used", "resume", LOADER, "        return self.returned\n",
           "        return self._snapshot()\n",
           "A resumed run leaves out the samples that were prepared ahead.", (DOCUMENTS_RESUMED, RESUMED),
           (f"{LOADS}::test_state_is_of_what_was_returned_not_of_what_was_prepared",), "huggingface/accelerate#2016"),
    Mutant("streams begin anew", "resume", LOADER, "            self.samples.load(slot, slots[slot])\n", "            pass\n",
           "A resumed run reads its streams of documents from their beginning.", (DOCUMENTS_RESUMED,),
           (f"{LOADS}::test_goes_on_exactly_from_a_saved_state_on_other_ranks",), "pytorch/torchtitan#3908"),
    Mutant("the states of one rank are kept", "resume", LOADER, '        merged["slots"] |= state["slots"]\n',
           '        merged["slots"] = state["slots"]\n', "The saved state of the data contains only the slots of the last rank.",
           (DOCUMENTS_RESUMED, RESUMED),
           (f"{LOADS}::test_goes_on_exactly_from_a_saved_state_on_other_ranks", RESUME)),
    Mutant("a document's state lacks its place", "resume", STREAMS, ' | {"token": token}\n',
           ' | {"token": token, "place": 0}\n', "With a shuffle buffer, a resumed stream repeats a block.", (DOCUMENTS_RESUMED,),
           (f"{STREAM_TESTS}::test_a_shuffle_buffer_is_exact_wherever_its_state_is_taken",)),
    Mutant("a mixture forgets its sources' positions", "resume", MIXTURE,
           "            self.parts[name].load(slot, state[name])\n", "            pass\n",
           "Sources of a mixture begin anew after a resume.", ("fsdp 2, a mixture, resumed",),
           ("tests/core/data/test_mixture.py::test_three_sources_keep_their_proportions_on_any_ranks_and_across_resume",)),

    Mutant("the next epoch fills the last batch of a pass", "any", LOADER, "number < self.once else None", "True else None",
           "The first rows of a pass are learned twice.", (),
           ("tests/core/data/test_epoch.py::test_each_row_is_read_once_on_every_layout_and_over_a_stop",)),

    # order of data
    Mutant("a token between samples is lost", "any", STREAMS, 'token = self.state["token"] + self.seq_len',
           'token = self.state["token"] + self.seq_len + 1', "The last token of a sample is not the first of the next.",
           ("llama3, packed documents, against float64",),
           (f"{STREAM_TESTS}::test_packing_loses_and_doubles_no_token",)),
    Mutant("every epoch has the same order of units", "any", STREAMS, "return permute(position, self.source.units, self.seed, epoch)",
           "return permute(position, self.source.units, self.seed)", "Slots read the same units in every epoch.", (),
           (f"{STREAM_TESTS}::test_every_slot_meets_every_unit",)),
    Mutant("samples overlap by a token less", "any", ITEMS, "dtype, first = np.dtype(header[\"dtype\"]), sample * self.seq_len",
           "dtype, first = np.dtype(header[\"dtype\"]), sample * (self.seq_len - 1)",
           "Neighbouring samples of a token file overlap by one token too many.", (),
           ("tests/core/data/test_items.py::test_an_epoch_visits_every_sample_of_every_file_once",
            "tests/core/data/test_items.py::test_tokens_are_what_the_stream_of_the_same_text_packs")),
    Mutant("sources of a mixture share a seed", "any", "core/data/__init__.py", "wanted, _seed_of(name, seed))", "wanted, seed)",
           "Synthetic sources of a mixture give the same tokens.", (MIXTURE_EXACT,),
           ("tests/core/data/test_mixture.py::test_synthetic_sources_are_not_alike",)),
    Mutant("held-out samples are those of training", "validation", "core/data/__init__.py", 'return seed if self.split == "train" else ~seed',
           "return seed", "A validation on synthetic data uses samples of the training data.", (MASKED,),
           (f"{LOADS}::test_synthetic_validation_is_not_training",)),

    # states in the host's memory; only the pretended device has streams
    Mutant("updated states are not kept", "optimizer.offload", OFFLOADED, "            pairs.append((host, device))\n", "",
           "Every step begins with the states of the step before.", (), (OFFLOAD_TESTS,)),
    Mutant("states are loaded for other parameters", "optimizer.offload", OFFLOADED, "zip(numbers, parameters, strict=True)",
           "zip(numbers, reversed(parameters), strict=True)", "A resumed run has the states in reverse order.", (), (OFFLOAD_TESTS,)),
    Mutant("groups that are updated alone lose an option", "optimizer.offload", OFFLOADED, 'yield group | {"params": own}\n            own',
           'yield group | {"params": own, "lr": 0.0, "peak_lr": 0.0}\n            own', "Some parameters are not trained.", (), (OFFLOAD_TESTS,)),
    Mutant("an update does not wait for its states", "optimizer.offload", OFFLOADED, "            wait(here)\n", "",
           "States are updated while they are copied.", (), (STATES,)),
    Mutant("states are freed before they are on the host", "optimizer.offload", OFFLOADED, "            wait(leaving)\n", "",
           "Other states overwrite those that are copied.", (), (STATES,)),
    Mutant("copies do not wait for updates", "optimizer.offload", OFFLOADED,
           "    stream.wait_stream(torch.cuda.current_stream())\n", "", "States are copied to the host while they are updated.", (), (STATES,)),
    Mutant("the event comes before the copies of states", "optimizer.offload", OFFLOADED,
           "            local_part(target).copy_(local_part(source), non_blocking=True)\n        return stream.record_event()\n",
           "            end = stream.record_event() if target is pairs[0][0] else end\n"
           "            local_part(target).copy_(local_part(source), non_blocking=True)\n        return end if pairs else stream.record_event()\n",
           "What waits for copies waits for nothing.", (), (STATES,)),
    Mutant("states are not pinned", "optimizer.offload", OFFLOADED, "pin_memory=value.is_cuda", "pin_memory=False",
           "The host waits for every copy.", (), (STATES,)),
]
# fmt: on
