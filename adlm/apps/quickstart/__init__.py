"""The quickstart: prepare text, train ADLM and MDLM, compare them and write a report."""
