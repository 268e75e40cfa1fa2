"""The data sets of problems, one file each: reader, rules, anchor labels, generator, and their `ProblemSet`."""
