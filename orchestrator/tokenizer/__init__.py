"""What a model's tokenizer says next to token ids: chat template, defaults of sampling.

Imports specdec alone; knows neither requests nor the contract's messages.
Start at chat_template.py.
"""
