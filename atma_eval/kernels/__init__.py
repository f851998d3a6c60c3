"""Operations of the models, one module each; `README.md` beside this file has the maths."""
