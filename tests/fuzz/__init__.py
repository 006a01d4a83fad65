"""Fuzzing: random cases of every op against its formula in float64, and of files and settings against our readers.

`python -m tests.fuzz --cases 1000 --ops symmetric_attention,lista_step` (`TRITON_INTERPRET=1 … --backend triton` for
the kernels) and `python -m tests.fuzz --cases 2000 --files videos,archives,rows,settings`. A case is its seed.

The one criterion of a case, for each result and each gradient: it differs from the formula in float64, at the values
that the arguments have in their dtype, by at most TIMES times what changes there when every number of every argument is
multiplied by 1 ± eps of the dtype (the larger of two draws), plus TIMES eps of the largest result (of a gradient: or of
the largest argument, as what cancels leaves rounding), both as maxima.
Where the formula leaves the dtype's range (computed in that dtype: where ours is not finite) nothing is compared. NaN
and infinity that are planted in one sample reach no other, and in padding nothing at all. Whatever is given, nothing
but InputError is raised.
"""
