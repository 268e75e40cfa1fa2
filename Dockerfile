# Not built or run yet: there was no Docker where this file was written. An image of `adlm serve`; docs/serving.md has the commands.
FROM python:3.12-slim
# A package index with CPU builds of torch makes the image smaller: --build-arg TORCH_INDEX=URL
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.11"
COPY pyproject.toml README.md LICENSE /src/
COPY adlm /src/adlm
RUN pip install --no-cache-dir "/src[web]" && useradd --create-home adlm
USER adlm
EXPOSE 8000
# Other machines can connect, so adlm serve requires a key: the environment variable ADLM_API_KEY.
ENTRYPOINT ["adlm", "serve", "--host", "0.0.0.0"]
