"""Fuzzing: random cases of every op against its formula in float64.

`python -m tests.fuzz --cases 1000 --ops symmetric_attention,lista_step`, and for the kernels, in Triton's interpreter,
`TRITON_INTERPRET=1 python -m tests.fuzz --backend triton`. A case is its op and its seed.

The one criterion of a case, for each result and each gradient: it differs from the formula in float64, at the values
that the arguments have in their dtype, by at most TIMES times what changes there when every number of every argument is
multiplied by 1 ± eps of the dtype (the larger of two draws), plus TIMES eps of the largest result (of a gradient: or of
the largest argument, as what cancels leaves rounding), both as maxima; or it differs by at most TIMES_TORCH times what
the formula itself does, computed by torch in that dtype. In float64, where the formula rounds as we do, TIMES counts
TIMES_FLOAT64 times.
Where the formula leaves the dtype's range (computed in that dtype: where ours is not finite) nothing is compared. NaN
and infinity that are planted in one sample reach no other, and in padding nothing at all. Whatever is given, nothing
but InputError is raised.
"""
