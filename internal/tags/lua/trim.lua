-- Drops what has ended, of a few fields of the book. A load older than a mark that is dropped is refused by the floor.
local function trim(book, now, floor)
  local some = redis.call('HRANDFIELD', book, 3, 'WITHVALUES')
  for i = 1, #some, 2 do
    local kind, field, value = string.sub(some[i], 1, 1), some[i], some[i + 1]
    if kind == 't' and tonumber(value) < now then
      redis.call('HDEL', book, field)
    elseif kind == 'm' then
      local n, ends = string.match(value, '^(%d+) (%d+)$')
      if tonumber(ends) < now then
        redis.call('HDEL', book, field)
        floor = math.max(floor, tonumber(n))
        redis.call('HSET', book, 'f', floor)
      end
    end
  end
end

