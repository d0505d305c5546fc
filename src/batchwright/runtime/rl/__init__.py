"""Reinforcement learning, executed: sampling overlaps training, and every prompt counts exactly once.

task       what a user gives: a rollout, a loss on responses, and how groups are prepared
settings   where responses are sampled, how far ahead, and what happens to old ones
rounds     the arithmetic: which prompts, updates and policy versions a round has
responses  finished responses, one file for each rollout micro batch, which survive a kill
link       messages between the trainer and the processes that sample, and the weights that they get
worker     what such a process does, and how it is started
rollouts   what the trainer asks for, in which order, and what it does if nobody answers
feed       what a micro step of an update is fed
record     what a round was, and where its time went
ranks      trainers and samplers as ranks of one torchrun job
train      the loop: `train_rl`
"""
