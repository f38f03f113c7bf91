"""FlexNPU's errors and gaps, as far as its own numbers show them; ``tests/null/papers`` computes the numbers again."""

ERRORS = (
    "our copy of the paper ends section 3.4 after its first paragraph: the next page, with the policy, Figure 4 and the "
    "beginning of section 4, is missing. Figures are pictures, of which our copy has only the captions and the text around them",
    "Table 4 contradicts itself in its dynamic column: 200 requests arrive within 50 s, so TTFT and 255 TPOTs end the last of "
    "256/256 after 56 s on average, but the throughput needs 265 s. Even if requests ended one after another, the mean latency "
    "would have to be 102.8 s longer than TTFT and TPOT say (256/1024: 483, 1024/256: 101, 1024/1024: 488). In the static "
    "column the three figures fit",
    '"sub-second" TTFT "across all workloads" is 8.3 to 8.6 s with prompts of 1024 tokens',
    "26.33 % (abstract, Table 3) is 26.20 % by the total of 618.18 requests per second, and 26.40 % by prefill's 619.18",
    "decode at 1K-4K has 53 requests per second in Table 2 and 146.63 in Table 3; the 5.15 % refer to the latter",
    "Table 2 and its text differ: prefill at 1K-4K has a redundancy of 40 %, so it needs 60 % of its time slices, but up to "
    "40 % in the text; decode memory at 1K-1K has a redundancy of 77 %, so it uses 23 %, but up to 25 % in the text",
    "the time slice redundancies do not follow from the rates: 490 of 812 requests per second leave 40 % of decode's time, not "
    "75 %, and 146.63 of 490 leave 70 % of prefill's (53 of 490: 89 %), not 40 %",
    "if a quarter of decode's time slices were enough, 96 + 72 cards would serve 490 requests per second, and 384 cards 1120; "
    "co-located they serve 618. The rates alone allow 697",
    "decode's memory does not follow from the rates: at equal TPOT, 53 requests per second at 1K-4K need 0.87 times the KV of "
    "490 at 1K-1K, and 146.63 need 2.39 times; the table has 39 % in use against 23 %, 1.70 times",
    "the overload of Table 4 is explained by a rate of 4 per second that equals max_num_seqs=4, two things of different units; "
    "its reason is that the device ends only 0.73 requests per second",
    "contribution 3 claims more throughput than static co-location; Table 4 has -0.5 to +3.6 %, on one small model",
    "Table 3 was measured under TTFT <= 1 s and TPOT <= 50 ms, and gives neither",
)
"""Errors and gaps of the paper, which the tests do not copy."""
