from finback.shared.engine.step_times import StepTimes, bucket_of, bucket_range


def test_buckets_cover_every_count_once() -> None:
    for num_rows in range(1, 5000):
        low, high = bucket_range(bucket_of(num_rows))
        assert low <= num_rows <= high
        assert high - low <= num_rows // 4


def test_table_and_expectation() -> None:
    times = StepTimes()
    assert times.expected_ms(1) is None
    times.record(1, 6.0)
    times.record(1, 8.0)
    times.record(300, 100.0)
    rows = times.table()
    assert [(row.low, row.num_steps, row.mean_ms) for row in rows] == [(1, 2, 7.0), (256, 1, 100.0)]
    assert times.expected_ms(1) == rows[0].recent_ms
    assert times.expected_ms(40) == 100.0  # the next larger one that is known
    assert times.expected_ms(4000) is None


def test_tokens_per_second_forgets() -> None:
    times = StepTimes()
    times.record_tokens(10.0, 30)
    times.record_tokens(12.0, 30)
    assert times.tokens_per_s(12.5) == 20.0
    assert times.tokens_per_s(14.0) == 10.0
    assert times.tokens_per_s(99.0) == 0.0


def test_rows_within_a_time_follow_the_steps_of_many_rows() -> None:
    times = StepTimes()
    times.record(4, 10.0)
    assert times.rows_within(50.0) is None
    times.record(200, 100.0)
    assert times.rows_within(50.0) == 96  # 100 rows, whole groups of 32
    for _ in range(50):
        times.record(96, 24.0)
    assert times.rows_within(50.0) == 192  # 199 rows of 0.25 ms
    assert times.rows_within(0.001) == 64  # prompts get on however slow the machine is
