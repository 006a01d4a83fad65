"""Fuzzing: random cases of every op against its formula.

`python -m tests.fuzz --cases 1000 --ops symmetric_attention,lista_step`, and for the kernels, in Triton's interpreter,
`TRITON_INTERPRET=1 python -m tests.fuzz --backend triton`. A case is its op and its seed; with `--json FILE` a campaign
goes on where that file ends.

The one criterion of a case. The truth is the formula in float64 at the values that the arguments have in their dtype;
of float64 arguments it is the formula in extended precision (`wide`), so that no dtype is judged by itself. Of each
result and each gradient, by the maximum and by the root mean square of all its numbers,

    error ≤ 1.5 E + eps |truth| + √n C

- E: the error of the formula as torch computes it in that dtype; 1.5 is what the tests of the kernels allow.
- eps |truth|: the rounding of the result.
- C: the largest change of the formula, of three draws, when every argument and the result of every step of torch,
  forward and backward, is off by one rounding: times 1 ± eps, the sign drawn (Monte Carlo arithmetic; Parker, 1997).
  It is what the case's own conditioning makes of roundings that nobody can avoid. A softmax counts as two steps, with
  the log-sum-exp between them: kernels keep that of a row for their backward.
- √n: of the n terms of the longest sum. Their partial sums round too, which grows as √n (Higham and Mary, 2019).

No number of it is fitted to what passes. Where the formula leaves the dtype's range (computed in that dtype: where ours
is not finite) nothing is compared; gradients that exceed it are not where rounding decides which of the codes are zero.
NaN and infinity that are planted in one sample reach no other, and in padding nothing at all. Whatever is given,
nothing but InputError is raised.
"""
