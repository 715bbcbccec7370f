"""Who writes the codes while a policy learns: the model in process (rollout=hf), or vLLM servers (rollout=vllm).

python -m bt_policy.rollout data=episodes model.adapter=DIR out=ROUND      # a rows file that method=ppo reads
"""
