# frozen_string_literal: true

# Points of known shape: a program says what its stack is, and stays there.
#
# `Points.at("name"); i = 0; i += 1 while i < $spin; Points.done` on one line
# prints the stack as Ruby itself knows it and the time that was spent on that
# line. Runs on Ruby 2.7 and newer. What is printed:
#
#     point NAME TID BEGIN END       (CLOCK_MONOTONIC, nanoseconds)
#     frame LABEL BASE_LABEL FILE LINE  (one a frame, leaf first)
#
# Fields are separated by tabs; bytes that are not UTF-8 are written as `\xNN`.
module Points
  # CPU time to spend at a point, nanoseconds.
  SPIN_NS = Integer(ENV.fetch("SPIN_MS", "30")) * 1_000_000

  def self.cpu
    Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond)
  end

  def self.now
    Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
  end

  # How often `i += 1 while i < n` goes round in the time for a point.
  def self.calibrate
    n = 100_000
    loop do
      before = cpu
      i = 0
      i += 1 while i < n
      spent = cpu - before
      return n * SPIN_NS / spent if spent > 20_000_000
      n *= 2
    end
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

  def self.at(name)
    @frames = caller_locations(1).map do |location|
      ["frame", shown(location.label), shown(location.base_label), shown(file_of(location)), location.lineno.to_i].join("\t")
    end
    @name = "#{name}\t#{tid}"
    @begin = now
  end

  def self.done
    finish = now
    $stdout.write("point\t#{@name}\t#{@begin}\t#{finish}\n", @frames.join("\n"), "\n")
    $stdout.flush
  end

  # Tells whoever listens that all is set up, and waits for the word to go on.
  def self.ready
    $stdout.write("ready\n")
    $stdout.flush
    $stdin.gets
  end

  # The same at the end, so that nothing is gone before it was looked at.
  def self.finished
    $stdout.write("finished\n")
    $stdout.flush
    $stdin.gets
  end
end

$spin = Points.calibrate
