# Sourced by gpu_check.sh and npu_check.sh: check_device KIND OPTION...
#
# Values, and rows between the devices bit for bit; then time, hidden share and memory of a layer of Qwen3.5-35B's size in
# bf16, by `mindspeed-chunk bench` with all cases; then one call by the device's profiler, with `mindspeed-chunk trace`.
# With one device its peers are played. It takes at most 15 minutes, installs nothing and needs no network. Without a
# device it says so and ends with exit code 0. Options are those that both commands have, such as --tokens.
#
#   CASES   cases of bench (default: all)

check_device() {
    local kind=$1 found size share=()
    shift
    found=$("$PYTHON" -c "from mindspeed_chunk.tools import devices as d; print(d.missing('$kind') or d.count('$kind'))")
    found=$(tail -n 1 <<<"$found")
    if ! [[ $found =~ ^[0-9]+$ ]]; then
        echo "skipped: $found"
        return
    fi
    mkdir -p "$OUT"
    size=(--device "$kind" --tokens 16384 --hidden 2048 --intermediate 512 --experts 256 --top-k 8 --dtype bfloat16)
    if [ "$found" = 1 ]; then
        size+=(--stand-in --link 400gbit)
        share=(--hidden-share)
    fi
    {
        timeout 600 "$PYTHON" -m mindspeed_chunk.tools bench "${size[@]}" "${share[@]}" --cases "${CASES:-all}" \
            --repeats 7 --json "$OUT/record.json" --device-file "$OUT/device.yaml" "$@"
        timeout 290 "$PYTHON" -m mindspeed_chunk.tools trace "${size[@]}" --out "$OUT/layer" "$@"
        echo "done: send the folder $OUT"
    } 2>&1 | tee "$OUT/report.txt"
}
