# frozen_string_literal: true

# Points of known shape: a program says what its stack is, and stays there.
#
# `Points.at("name"); i = 0; i += 1 while i < $spin; Points.done` on one line
# prints the stack as Ruby itself knows it and the time that was spent on that
# line. Runs on Ruby 2.7 and newer. What is printed:
#
#     point NAME TID BEGIN END       (CLOCK_MONOTONIC, nanoseconds)
#     frame LABEL BASE_LABEL FILE LINE  (one a frame, leaf first)
#     compiled COUNT                 (at the end: code units that YJIT compiled)
#
# Where the time is not spent on the line of the call, `Points.at` is told how
# many lines below, or in which method that is called next.
#
# Fields are separated by tabs; bytes that are not UTF-8 are written as `\xNN`.
module Points
  # CPU time to spend at a point, nanoseconds.
  SPIN_NS = Integer(ENV.fetch("SPIN_MS", "30")) * 1_000_000

  # Whether points become longer when the machine turns out to be faster.
  RECALIBRATES = ENV.key?("RECALIBRATE")

  def self.cpu
    Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond)
  end

  def self.now
    Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
  end

  # How often `i += 1 while i < $spin` goes round in the time for a point. On an
  # emulated machine, time that it was not given counts as spent: `CALIBRATIONS`
  # says of how many attempts the best counts.
  def self.calibrate
    $spin = 100_000
    best = rounds_take
    while best <= 20_000_000
      $spin *= 2
      best = rounds_take
    end
    (Integer(ENV.fetch("CALIBRATIONS", "1")) - 1).times { best = [best, rounds_take].min }
    $spin * SPIN_NS / best
  end

  # Machines that become faster while they run: what the last point took says how
  # much the next must be, at least. What took longer may have had other reasons.
  def self.recalibrate(took)
    $spin = ($spin * SPIN_NS / [took, 1].max).clamp($spin, $spin * 2)
  end

  def self.rounds_take
    before = cpu
    i = 0
    i += 1 while i < $spin
    cpu - before
  end

  # What the kernel calls this thread.
  def self.tid
    File.readlink("/proc/thread-self")[/\d+\z/]
  end

  def self.shown(text)
    text = text.dup.force_encoding(Encoding::UTF_8)
    text.scrub { |bytes| bytes.each_byte.map { |byte| format("\\x%02X", byte) }.join }
  end

  def self.file_of(location)
    # Code from a string has no file, even where Ruby says that it has.
    path = location.path
    # A method written in C is where its caller is; in a fiber there may be none.
    return "-" unless path

    path.start_with?("(", "<") ? path : location.absolute_path || path
  end

  def self.at(name, below: 0, inside: nil)
    return if @rehearsing

    @frames = caller_locations(1).map do |location|
      ["frame", shown(location.label), shown(location.base_label), shown(file_of(location)), location.lineno.to_i]
    end
    @frames[0][-1] += below
    @frames.unshift(["frame", *inside]) if inside
    @name = "#{name}\t#{tid}"
    @begin = now
    @spent = cpu if RECALIBRATES
  end

  def self.done
    return if @rehearsing

    finish = now
    recalibrate(cpu - @spent) if RECALIBRATES
    $stdout.write("point\t#{@name}\t#{@begin}\t#{finish}\n", @frames.map { |frame| frame.join("\t") }.join("\n"), "\n")
    $stdout.flush
  end

  # Goes through points without being there: what YJIT compiles when it gets to
  # it is compiled afterwards.
  def self.rehearse
    spin, $spin = $spin, 1
    @rehearsing = true
    yield
  ensure
    @rehearsing = false
    $spin = spin
  end

  # How many methods and blocks YJIT has compiled; 0 if it is off.
  def self.compiled
    return 0 unless defined?(RubyVM::YJIT) && RubyVM::YJIT.enabled?

    RubyVM::YJIT.runtime_stats[:compiled_iseq_count]
  end

  # Tells whoever listens that all is set up, and waits for the word to go on.
  def self.ready
    $stdout.write("ready\n")
    $stdout.flush
    $stdin.gets
  end

  # The same at the end, so that nothing is gone before it was looked at.
  def self.finished
    $stdout.write("compiled\t#{compiled}\nfinished\n")
    $stdout.flush
    $stdin.gets
  end
end

# A Float instead, so that each round calls `Integer#<`, and that a function of
# the C library: a place to stop the program at.
$spin = ENV["SPIN_ROUNDS"] ? Float(ENV["SPIN_ROUNDS"]) : Points.calibrate
# Once beforehand, for loaders that look a function up when it is first called.
0 < $spin
