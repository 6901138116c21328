"""Hugging Face's Trainer: a small GPT-2 over bytes, whole or with LoRA adapters (peft)."""

import common
import torch
from support.text import Windows, read_text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import psclient

CONTEXT, RATE = 64, 2e-3


class Served(TrainerCallback):
    """Ends the training with the run; what is tested and saved after an epoch is the server's model."""

    def __init__(self, optimizer: psclient.ServerOptimizer) -> None:
        self.optimizer = optimizer

    def on_step_end(self, args, state, control, **_: object) -> None:
        control.should_training_stop |= self.optimizer.finished

    def on_epoch_end(self, args, state, control, **_: object) -> None:
        self.optimizer.pull()


def make_optimizer(model, options):
    trained = [each for each in model.parameters() if each.requires_grad]
    if not options.server:
        return torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
    return psclient.ServerOptimizer(
        trained,
        "AdamW",
        {"lr": RATE, "weight_decay": 0.01},
        model=model,
        server=options.server,
        on_load="server",  # Trainer loads its checkpoint later: a run that is further keeps the server's model
    )


def windows(text: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
    found = Windows(text, CONTEXT)
    return [{"input_ids": found[i][0], "labels": found[i][0]} for i in range(min(count, len(found)))]


def main() -> None:
    parser = common.parser(__doc__, epochs=3)
    parser.add_argument("--lora", action="store_true", help="train adapters, and leave the model as it is")
    options = parser.parse_args()
    set_seed(0)  # what is frozen must be the same on all workers
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    optimizer = make_optimizer(model, options)
    train, test = read_text(None, 200_000)
    trainer = Trainer(
        model,
        TrainingArguments(
            options.out,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            save_strategy="epoch",
            save_total_limit=2,
            eval_strategy="epoch",
            data_seed=options.seed,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=windows(train, 800),
        eval_dataset=windows(test, 64),
        optimizers=(optimizer, None),  # Trainer makes the scheduler
        callbacks=[Served(optimizer)] if options.server else [],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if options.server:
        optimizer.wait_for_all()  # until the other workers are through
        optimizer.pull()  # the server's model, the same on all workers
    print(f"in the end: test loss {trainer.evaluate()['eval_loss']:.3f}", flush=True)
    common.save(model.state_dict(), options.out / "model.pt")


if __name__ == "__main__":
    main()
