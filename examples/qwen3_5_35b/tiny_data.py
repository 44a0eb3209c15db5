"""A data set for MindSpeed-MM that needs no download: the Python standard library's source files, byte by byte.

MindSpeed-MM imports this module because `training.plugin` names it; `dataset_type: standard_library` then finds it.
"""

import torch
from mindspeed_mm.fsdp.utils.register import data_register

from mindspeed_chunk.standalone.data import PackedText


class StandardLibrary(torch.utils.data.Dataset):
    def __init__(self, sequence_length):
        self._text = PackedText(sequence_length, seed=0)

    def __len__(self):
        return self._text.num_samples

    def __getitem__(self, index):
        return self._text.batch(index, 1)[0]

    @staticmethod
    def collate_fn(rows):
        input_ids = torch.stack(rows)
        return {"input_ids": input_ids, "labels": input_ids.clone(), "attention_mask": torch.ones_like(input_ids)}


@data_register.register("standard_library")
def build(basic_param, **_):
    return StandardLibrary(basic_param["cutoff_len"])
